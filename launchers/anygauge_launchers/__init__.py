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
        LauncherSpec(
            name="ssh",
            factory="anygauge_launchers.ssh:Ssh",
            options="anygauge_launchers.ssh:SshOptions",
            api_version=WRITTEN_FOR,
            tested_on="real",
            remote=True,
            hardware="anygauge_launchers:machines.toml",
        ),
        LauncherSpec(
            name="slurm",
            factory="anygauge_launchers.slurm:Slurm",
            options="anygauge_launchers.slurm:SlurmOptions",
            api_version=WRITTEN_FOR,
            tested_on="real",
            remote=True,
            can=frozenset({"detach", "warn", "requeue"}),
            hardware="anygauge_launchers:machines.toml",
        ),
        LauncherSpec(
            name="mpi",
            factory="anygauge_launchers.mpi:Mpi",
            options="anygauge_launchers.mpi:MpiOptions",
            api_version=WRITTEN_FOR,
            tested_on="real",
            remote=True,
            hardware="anygauge_launchers:machines.toml",
        ),
    ]
