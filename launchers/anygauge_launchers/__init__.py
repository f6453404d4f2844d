"""The launchers that come with anygauge."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import API_VERSION, LauncherSpec, hookimpl


@hookimpl
def anygauge_provide_launchers() -> Iterable[LauncherSpec]:
    """Announce the launchers of this distribution."""
    return [
        LauncherSpec(
            name="local",
            factory="anygauge_launchers.local:Local",
            api_version=API_VERSION,
            fidelity="real",
            max_nodes=1,
        ),
        LauncherSpec(
            name="ssh",
            factory="anygauge_launchers.ssh:Ssh",
            api_version=API_VERSION,
            fidelity="real",
            elsewhere=True,
        ),
        LauncherSpec(
            name="slurm",
            factory="anygauge_launchers.slurm:Slurm",
            api_version=API_VERSION,
            fidelity="real",
            elsewhere=True,
            can=frozenset({"detach", "warn", "requeue"}),
        ),
        LauncherSpec(
            name="mpi",
            factory="anygauge_launchers.mpi:Mpi",
            api_version=API_VERSION,
            fidelity="real",
            elsewhere=True,
        ),
        LauncherSpec(
            name="kubernetes",
            factory="anygauge_launchers.kubernetes:Kubernetes",
            api_version=API_VERSION,
            fidelity="emulated",
            elsewhere=True,
            apart=True,
            can=frozenset({"detach", "warn", "requeue"}),
        ),
        LauncherSpec(
            name="azureml",
            factory="anygauge_launchers.azureml:Azureml",
            api_version=API_VERSION,
            fidelity="emulated",
            elsewhere=True,
            apart=True,
            can=frozenset({"detach"}),
        ),
        LauncherSpec(
            name="sagemaker",
            factory="anygauge_launchers.sagemaker:Sagemaker",
            api_version=API_VERSION,
            fidelity="emulated",
            elsewhere=True,
            apart=True,
            can=frozenset({"detach", "warn", "requeue"}),
        ),
    ]
