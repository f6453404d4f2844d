"""The launchers of jobs that are handed to a service: Kubernetes, Azure ML, SageMaker."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import LauncherSpec, hookimpl

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_launchers() -> Iterable[LauncherSpec]:
    """Announce the clouds' launchers."""
    return [
        # Its clusters consist of machines that anygauge_launchers describes.
        _launcher("kubernetes", "", "detach", "warn", "requeue"),
        _launcher("azureml", "anygauge_clouds:azure.toml", "detach"),
        _launcher("sagemaker", "anygauge_clouds:aws.toml", "detach", "warn", "requeue"),
    ]


def _launcher(name: str, hardware: str, *can: str) -> LauncherSpec:
    factory = f"anygauge_clouds.{name}:{name.capitalize()}"
    return LauncherSpec(
        name=name,
        factory=factory,
        options=f"{factory}Options",
        api_version=WRITTEN_FOR,
        tested_on="emulated",
        remote=True,
        shared_filesystem=False,
        can=frozenset(can),
        hardware=hardware,
    )
