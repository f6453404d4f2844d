"""Launchers whose users list the machines: ssh, and Open MPI.

One agent on each machine, started by an ssh that lives as long as the job, or by one mpirun, which
passes signals and output on.

The command that ssh hands to the remote shell holds nothing but the interpreter's path. Arguments
and variables go through standard input, so no shell reads them; and since standard input ends when
this process does, whatever ended it, no agent stays behind.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from anygauge.interface import (
    Job,
    LauncherOptions,
    LaunchProfile,
    Plan,
    PlannedProcess,
    RunFileError,
    variables_file,
)
from anygauge_launchers.remote_job import ForegroundLauncher, job_file, keep_alive

_HOST = re.compile(r"^(?!-)[A-Za-z0-9_.:@\[\]%-]+$")


class HostsOptions(LauncherOptions):
    """Options of launchers whose users list the machines.

    Attributes:
        hosts: the machines, ``host`` or ``user@host``; the first is the coordinator.
        hostfile: a file of them instead, with lines ``host slots=N``.
        coordinator: address of the first machine for the others, where it is not its name.
    """

    hosts: list[str] = Field(default_factory=list)
    hostfile: str | None = None
    coordinator: str | None = None

    def resolve(self, job: Job) -> tuple[tuple[str, ...], str]:
        """One host for each node, in order, and ``host:port`` of the coordinator's agent.

        Raises:
            RunFileError: none or both are given, a name is not a host name, or there are not as
                many as nodes.
        """
        if bool(self.hosts) is (self.hostfile is not None):
            raise RunFileError(
                "launch.options: list the machines, either as hosts ([node1, node2]) or as "
                "hostfile (a path; lines `node1 slots=8`)"
            )
        found = (
            tuple(self.hosts) if self.hostfile is None else _read_hostfile(job, Path(self.hostfile))
        )
        where = "hosts" if self.hostfile is None else f"hostfile ({self.hostfile})"
        for host in found:
            if not _HOST.match(host):
                raise RunFileError(f"launch.options.{where}: {host!r} is not a host name")
        twice = sorted({host for host in found if found.count(host) > 1})
        if twice:
            raise RunFileError(f"launch.options.{where}: {', '.join(twice)} is listed twice")
        if len(found) != job.launch.nodes:
            raise RunFileError(
                f"launch.options.{where}: {len(found)} machines are listed ({', '.join(found)}), "
                f"and launch.nodes is {job.launch.nodes}. They must be the same; --nodes "
                f"{len(found)} takes all"
            )
        first = self.coordinator or found[0].rpartition("@")[2]
        return found, f"{first}:{job.launch.port}"


def _read_hostfile(job: Job, path: Path) -> tuple[str, ...]:
    """The hosts of a file; ``slots``, where given, must be enough for a node's ranks.

    Raises:
        RunFileError: it cannot be read, or a line is not one of a host file.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"launch.options.hostfile: {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, *rest = words
        for word in rest:
            name, _, value = word.partition("=")
            if name not in ("slots", "max_slots", "max-slots") or not value.isdecimal():
                raise RunFileError(
                    f"launch.options.hostfile: {path}, line {number}: {line.strip()!r} is not "
                    "`host` or `host slots=N`"
                )
            if name == "slots" and int(value) < job.launch.devices:
                raise RunFileError(
                    f"launch.options.hostfile: {path}, line {number}: {host} has {value} slots, "
                    f"and launch.devices is {job.launch.devices}"
                )
        found.append(host)
    return tuple(found)


# -- ssh --------------------------------------------------------------------------------------


def _plain(path: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_./+~-]+", path):
        raise ValueError(
            "a remote shell reads this path, so it may contain only letters, digits and "
            "_./+~-; make a link to it whose path has no other characters"
        )
    return path


class SshOptions(HostsOptions):
    """Options of the ssh launcher.

    Attributes:
        config: ssh's configuration file (``ssh -F``) instead of the user's.
        python: the interpreter on the machines; this one's path by default.
    """

    config: str | None = None
    python: Annotated[str, AfterValidator(_plain)] = Field(
        default=sys.executable, validate_default=True
    )


class Ssh(ForegroundLauncher):
    """Starts an agent on each host."""

    def render(self, job: Job, options: SshOptions, profile: LaunchProfile) -> Plan:
        """One job file in the shared run directory, and one ssh for each node."""
        hosts, coordinator = options.resolve(job)
        file = job_file(job)
        command = (
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
            *keep_alive(job),
            *(() if options.config is None else ("-F", options.config)),
        )
        common = ("--coordinator", coordinator, "--grace", f"{options.grace_s:g}")
        return Plan(
            files=(file,),
            processes=tuple(
                PlannedProcess(
                    node_rank=rank,
                    host=host,
                    argv=(
                        *command,
                        host,
                        f"exec {options.python} -m anygauge.launch.agent --stdin",
                    ),
                    arguments=("--job", file.path, "--node-rank", str(rank), *common),
                )
                for rank, host in enumerate(hosts)
            ),
            pass_environment=tuple(job.launch.pass_environment),
        )


# -- mpi --------------------------------------------------------------------------------------


def _whole(path: str) -> str:
    if len(path.split()) != 1:
        raise ValueError(
            "mpirun splits this path at its spaces; make a link to it whose path has none"
        )
    return path


class MpiOptions(HostsOptions):
    """Options of the mpi launcher.

    Attributes:
        config: ssh's configuration file for mpirun's own daemons.
        interface: network that mpirun's daemons meet on, such as ``eth0``; Open MPI's choice
            without it.
        extra: further arguments for mpirun, each as one text.
        python: the interpreter on the machines; this one's path by default.
    """

    config: Annotated[str, AfterValidator(_whole)] | None = None
    interface: str | None = None
    extra: list[str] = Field(default_factory=list)
    python: str = sys.executable


class Mpi(ForegroundLauncher):
    """Starts an agent on each host by mpirun."""

    def render(self, job: Job, options: MpiOptions, profile: LaunchProfile) -> Plan:
        """One job file in the shared run directory, and one mpirun."""
        hosts, coordinator = options.resolve(job)
        file = job_file(job)
        variables = variables_file(Path(file.path).parent)
        ssh = [*keep_alive(job)]  # of the ssh that leads to a daemon
        if options.config is not None:
            ssh += ["-F", options.config]
        settings = {"plm_rsh_args": " ".join(ssh)}
        if options.interface is not None:
            settings["btl_tcp_if_include"] = settings["oob_tcp_if_include"] = options.interface
        argv = (
            *(sys.executable, "-m", "anygauge.util.processes", "mpirun"),
            # Without it, mpirun refuses to run as root; the user has decided to.
            "--allow-run-as-root",
            *("-np", str(job.launch.nodes), "--host", ",".join(f"{host}:1" for host in hosts)),
            # An agent starts and places its ranks itself.
            *("--map-by", "ppr:1:node", "--bind-to", "none"),
            *(word for name, value in settings.items() for word in ("--mca", name, value)),
            *options.extra,
            *(options.python, "-m", "anygauge.launch.agent"),
            *("--job", file.path, "--node-rank", "$OMPI_COMM_WORLD_RANK"),
            *("--coordinator", coordinator, "--grace", f"{options.grace_s:g}"),
            *("--variables", variables.path, "--tied"),
            # mpirun's daemons behind a cut cable would wait for each other.
            "--parent-too",
        )
        return Plan(
            files=(file, variables),
            processes=(PlannedProcess(node_rank=0, host=hosts[0], argv=argv),),
            pass_environment=tuple(job.launch.pass_environment),
        )
