"""``python -m anygauge_clouds.mpi_pod NODES COMMAND ...``: mpirun in an MPIJob's launcher.

Starts the command once on each worker, with the address of the first worker, and turns the
cluster's request to end into the signal that mpirun passes on.

``... mpi_pod end``, in a worker that is about to end, asks its agent to end and waits until it has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

AGENT = b"anygauge.agent"
HOSTFILE = "OMPI_MCA_orte_default_hostfile"
SSH_ARGUMENTS = "OMPI_MCA_plm_rsh_args"
"""Both are set by the operator in the launcher."""


def coordinator_of(hostfile: Path) -> str:
    """The first host of a host file.

    Raises:
        ValueError: the file names no host.
    """
    for line in hostfile.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words:
            return words[0].partition(":")[0]
    raise ValueError(f"{hostfile} names no host")


def agents() -> list[int]:
    """Processes of this container that are agents."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and AGENT in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_agents() -> None:
    """Ask the agents for a checkpoint and their end, once, and wait as long as they take."""
    for pid in agents():
        with contextlib.suppress(ProcessLookupError):
            # The launcher asks as well, and a second SIGTERM would leave no time for a checkpoint.
            os.kill(pid, signal.SIGUSR1)
    while agents():
        time.sleep(0.2)


def ssh_arguments() -> str:
    """The operator's, and acceptance of unknown hosts: pods are new, and keys authenticate them."""
    given = os.environ.get(SSH_ARGUMENTS, "")
    return f"{given} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null".strip()


def main(argv: list[str]) -> int:
    """Run mpirun to its end; returns its exit status."""
    if argv == ["end"]:
        end_agents()
        return 0
    path = os.environ.get(HOSTFILE)
    if path is None:
        print(f"{HOSTFILE} is not set: this is not the launcher of an MPIJob", file=sys.stderr)
        return 1
    try:
        coordinator = coordinator_of(Path(path))
    except (OSError, ValueError) as error:
        print(f"{HOSTFILE}: {error}", file=sys.stderr)
        return 1
    nodes, *command = argv
    process: subprocess.Popen[bytes] | None = None
    requests = (signal.SIGTERM, signal.SIGINT)
    received = sent = 0

    def send() -> None:
        nonlocal sent
        while process is not None and sent < received:
            sent += 1
            process.send_signal(signal.SIGUSR1 if sent == 1 else signal.SIGTERM)

    def receive(signum: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        send()

    for signum in requests:
        signal.signal(signum, receive)
    try:
        process = subprocess.Popen(
            (
                *("mpirun", "--allow-run-as-root", "-np", nodes, "--map-by", "ppr:1:node"),
                # sshd on the workers has none of the image's variables.
                *("--bind-to", "none", "-x", "ANYGAUGE_COORDINATOR", "-x", "PATH"),
                *(("-x", "LD_LIBRARY_PATH") if "LD_LIBRARY_PATH" in os.environ else ()),
                *command,
            ),
            env={**os.environ, "ANYGAUGE_COORDINATOR": coordinator, SSH_ARGUMENTS: ssh_arguments()},
        )
    except OSError as error:
        print(f"mpirun cannot be started: {error}", file=sys.stderr)
        return 1
    # mpirun runs before `process` is set; a request of that time has waited until here.
    signal.pthread_sigmask(signal.SIG_BLOCK, requests)
    send()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, requests)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
