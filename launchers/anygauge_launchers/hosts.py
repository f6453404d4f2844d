"""Machines as users list them: host names, or a host file of Open MPI or DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field

from anygauge.interface import (
    Job,
    LauncherOptions,
    RunFileError,
)


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


_HOST = re.compile(r"^(?!-)[A-Za-z0-9_.:@\[\]%-]+$")


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
