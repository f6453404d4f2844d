"""``python -m anygauge_launchers.mpi_pod NODES COMMAND ...``: mpirun in an MPIJob's launcher.

Starts the command once on each worker, tells it where the first one is, and turns the cluster's
request to end into the signal that mpirun passes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

HOSTFILE = "OMPI_MCA_orte_default_hostfile"
"""Set by the operator in the launcher."""


def head_of(hostfile: Path) -> str:
    """The first host of a host file.

    Raises:
        ValueError: there is none.
    """
    for line in hostfile.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words:
            return words[0].partition(":")[0]
    raise ValueError(f"{hostfile} names no host")


def main(argv: list[str]) -> int:
    """Run mpirun to its end; returns its exit status."""
    path = os.environ.get(HOSTFILE)
    if path is None:
        print(f"{HOSTFILE} is not set: this is not the launcher of an MPIJob", file=sys.stderr)
        return 1
    try:
        head = head_of(Path(path))
    except (OSError, ValueError) as error:
        print(f"{HOSTFILE}: {error}", file=sys.stderr)
        return 1
    nodes, *command = argv
    process: subprocess.Popen[bytes] | None = None
    asked = 0

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if process is not None:
            process.send_signal(signal.SIGUSR1 if asked == 1 else signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
    try:
        process = subprocess.Popen(
            (
                *("mpirun", "--allow-run-as-root", "-np", nodes, "--map-by", "ppr:1:node"),
                *("--bind-to", "none", "-x", "ANYGAUGE_HEAD", *command),
            ),
            env={**os.environ, "ANYGAUGE_HEAD": head},
        )
    except OSError as error:
        print(f"mpirun cannot be started: {error}", file=sys.stderr)
        return 1
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
