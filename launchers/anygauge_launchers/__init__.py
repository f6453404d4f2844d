"""The launchers for machines that one reaches directly: local, ssh, Slurm, Open MPI."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import LauncherSpec, hookimpl

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_launchers() -> Iterable[LauncherSpec]:
    """Announce these launchers."""
    return [
        LauncherSpec(
            name="local",
            factory="anygauge_launchers.local:Local",
            options="anygauge.interface:LauncherOptions",
            api_version=WRITTEN_FOR,
            tested_on="real",
            max_nodes=1,
        ),
        _over_network("ssh", "hosts:Ssh"),
        _over_network("slurm", "slurm:Slurm", "detach", "warn", "requeue"),
        _over_network("mpi", "hosts:Mpi"),
    ]


def _over_network(name: str, factory: str, *can: str) -> LauncherSpec:
    return LauncherSpec(
        name=name,
        factory=f"anygauge_launchers.{factory}",
        options=f"anygauge_launchers.{factory}Options",
        api_version=WRITTEN_FOR,
        tested_on="real",
        remote=True,
        can=frozenset(can),
        hardware="anygauge_launchers:machines.toml",
    )
