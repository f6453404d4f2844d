"""Machines on one machine: each has a network, a host name and processes of its own.

Two nodes and a login machine hang on a bridge that leads nowhere else. They are namespaces of the
kernel: what happens on a wire between real machines happens here, and a node can be powered off or
its cable pulled. Files are shared, as on a cluster with one storage. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.child_processes import until

LOGIN = "login"
OF_JOB = (
    *("anygauge.launch", "anygauge.training", "fake_"),
    *("orted", "mpirun", "srun", "slurm_script"),
)
"""In the command lines of all that belongs to a job, wherever it runs."""


def why_not(*programs: str) -> str | None:
    """Why machines cannot be emulated here, or None."""
    if os.geteuid() != 0:
        return "emulated machines need root"
    for program in ("ip", "nsenter", "unshare", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(["ip", "netns", "add", "agprobe"], capture_output=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made: {tried.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", "agprobe"], check=True)
    return None


class Machines:
    """Some nodes (``node1``, ``node2``, ...) and a login machine."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.names = [*(f"node{k}" for k in range(1, nodes + 1)), LOGIN]
        self._tag = f"ag{os.getpid() % 100000}"
        self._booted: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = {name: f"10.77.0.{10 + k}" for k, name in enumerate(self.names, 1)}

    def __enter__(self) -> Machines:
        bridge = f"{self._tag}br"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in self.addresses.items()
        )
        for index, (name, address) in enumerate(self.addresses.items()):
            space, cable = self._space(name), f"{self._tag}c{index}"
            _run("ip", "netns", "add", space)
            _run(
                *("ip", "link", "add", cable, "type", "veth"),
                *("peer", "name", "eth0", "netns", space),
            )
            _run("ip", "link", "set", cable, "master", bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", space, "link", "set", device, "up")
            files = self._files(name)
            files.mkdir(parents=True)
            (files / "hosts").write_text(hosts)
            (files / "hostname").write_text(f"{name}\n")
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._booted):
            self.power_off(name)
        for index, name in enumerate(self.names):
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for what in (
                ("ip", "netns", "del", self._space(name)),
                ("ip", "link", "del", f"{self._tag}c{index}"),
            ):
                subprocess.run(what, capture_output=True, check=False)
            shutil.rmtree(self._files(name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}br"], capture_output=True, check=False)

    def command(self, name: str, argv: Sequence[object]) -> list[str]:
        """What runs a command on a machine that is up: with its network, name and hosts."""
        return [
            *("nsenter", f"--net=/run/netns/{self._space(name)}"),
            *("unshare", "--uts", "--mount", "bash", "-c", _DRESS, str(self._files(name)), name),
            *map(str, argv),
        ]

    def boot(self, name: str, argv: Sequence[str | Path], log: Path) -> None:
        """Switch a node on: the command is its first process, and nothing outlives it."""
        with log.open("ab") as output:
            self._booted[name] = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self._space(name)}"),
                    *("unshare", "--uts", "--mount", "--pid", "--mount-proc", "--fork"),
                    *("--kill-child", "bash", "-c", _DRESS, str(self._files(name)), name),
                    *map(str, argv),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def power_off(self, name: str) -> None:
        """Switch a node off: all its processes end at once, without a word."""
        process = self._booted.pop(name)
        process.kill()
        process.wait()

    def cut(self, name: str) -> None:
        """Pull a node's cable: nothing arrives, and nobody is told."""
        _run("ip", "link", "set", self._cable(name), "down")

    def reconnect(self, name: str) -> None:
        """Put the cable back."""
        _run("ip", "link", "set", self._cable(name), "up")

    def bytes_sent(self, name: str) -> int:
        """Bytes that a node has sent over its cable."""
        path = f"/sys/class/net/{self._cable(name)}/statistics/rx_bytes"
        return int(Path(path).read_text())

    def processes(self, name: str) -> list[int]:
        """Processes on a machine, as this one numbers them."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._space(name)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def commands(self, name: str) -> dict[int, str]:
        """Command lines of the processes on a machine."""
        found = {}
        for pid in self.processes(name):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[pid] = text.strip()
        return found

    def of_job(self, name: str, *, own: bool = False) -> dict[int, str]:
        """What belongs to a job on a machine.

        Args:
            own: agents and ranks alone, without what started them.
        """
        return {
            pid: text
            for pid, text in self.commands(name).items()
            if any(word in text for word in OF_JOB)
            and not (own and "python" not in text.split(" ")[0])
        }

    def _space(self, name: str) -> str:
        return f"{self._tag}{name}"

    def _cable(self, name: str) -> str:
        return f"{self._tag}c{self.names.index(name)}"

    def _files(self, name: str) -> Path:
        return self.folder / "machines" / name


# The host's own name, and who the others are; then the command in the shell's place.
_DRESS = (
    'hostname "$1"; mount --bind "$0/hosts" /etc/hosts; mount --bind "$0/hostname" /etc/hostname; '
    'shift; exec "$@"'
)


class SshServers:
    """Key-only ssh servers on all nodes, and a configuration that reaches them."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines = machines
        self._folder = folder
        self.config = folder / "ssh_config"
        folder.mkdir(mode=0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("id", "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (folder / "sshd_config").write_text(
            f"""Port 22
HostKey "{folder}/hostkey"
AuthorizedKeysFile "{folder}/id.pub"
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 50
"""
        )
        host_key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(
            "".join(f"{n},{a} {host_key}\n" for n, a in machines.addresses.items())
        )
        self.config.write_text(
            f"""Host *
  User root
  IdentityFile "{folder}/id"
  IdentitiesOnly yes
  UserKnownHostsFile "{folder}/known_hosts"
  StrictHostKeyChecking yes
"""
        )
        for name in machines.names:
            if name != LOGIN:
                self.start(name)

    def start(self, name: str) -> None:
        """Boot a node with its server, and wait until it listens."""
        server = shutil.which("sshd") or "/usr/sbin/sshd"
        self._machines.boot(
            name,
            [server, "-D", "-e", "-f", self._folder / "sshd_config"],
            self._folder / f"sshd.{name}.log",
        )
        deadline = time.monotonic() + 20
        probe = ["ssh", "-F", self.config, "-o", "ConnectTimeout=2", name, "true"]
        while subprocess.run(
            self._machines.command(LOGIN, probe), capture_output=True, check=False
        ).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError((self._folder / f"sshd.{name}.log").read_text())
            time.sleep(0.1)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


class SlurmCluster:
    """Slurm over the nodes: the controller on the login machine, one slurmd on each node."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines = machines
        self.folder = folder
        self._others: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        folder, nodes = self.folder, [n for n in self._machines.names if n != LOGIN]
        for part in ("state", "log", "run", *(f"spool.{name}" for name in nodes)):
            (folder / part).mkdir(parents=True)
        for public in (folder, folder / "run"):
            public.chmod(0o755)
        (folder / "cgroup.conf").touch()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(
            f"""ClusterName=emulated
SlurmctldHost={LOGIN}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=30
NodeName={",".join(nodes)} CPUs=4 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=30 State=UP
"""
        )
        run = folder / "run"
        # Needs no network: one daemon and its socket stand for the same key everywhere.
        self._start(
            [
                *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
                *(f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid"),
                *(f"--log-file={folder}/log/munged.log", f"--seed-file={run}/munged.seed"),
            ]
        )
        until((run / "munge.sock").exists, "munged")
        self._start(
            self._machines.command(
                LOGIN, ["slurmctld", "-D", "-f", folder / "slurm.conf", "-c", "-i"]
            )
        )
        for name in nodes:
            self.boot(name)
        until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(nodes)), "nodes")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._others):
            process.kill()
            process.wait()

    def boot(self, name: str) -> None:
        """Switch a node on, with its slurmd."""
        self._machines.boot(
            name,
            ["slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", name],
            self.folder / "log" / f"{name}.out",
        )

    def ask(self, *argv: str) -> str:
        """What one of Slurm's commands prints on the login machine."""
        done = subprocess.run(
            self._machines.command(LOGIN, argv),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
        )
        return done.stdout.strip()

    def _start(self, argv: Sequence[str]) -> None:
        with (self.folder / "log" / "daemons.out").open("ab") as output:
            self._others.append(
                subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )
            )  # fmt: skip
