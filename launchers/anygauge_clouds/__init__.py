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
        LauncherSpec(
            name="kubernetes",
            factory="anygauge_clouds.kubernetes:Kubernetes",
            options="anygauge_clouds.kubernetes_options:KubernetesOptions",
            api_version=WRITTEN_FOR,
            tested_on="emulated",
            remote=True,
            shared_filesystem=False,
            can=frozenset({"detach", "warn", "requeue"}),
        ),
        LauncherSpec(
            name="azureml",
            factory="anygauge_clouds.azureml:Azureml",
            options="anygauge_clouds.azureml:AzuremlOptions",
            api_version=WRITTEN_FOR,
            tested_on="emulated",
            remote=True,
            shared_filesystem=False,
            can=frozenset({"detach"}),
            hardware="anygauge_clouds:azure.toml",
        ),
        LauncherSpec(
            name="sagemaker",
            factory="anygauge_clouds.sagemaker:Sagemaker",
            options="anygauge_clouds.sagemaker_request:SagemakerOptions",
            api_version=WRITTEN_FOR,
            tested_on="emulated",
            remote=True,
            shared_filesystem=False,
            can=frozenset({"detach", "warn", "requeue"}),
            hardware="anygauge_clouds:aws.toml",
        ),
    ]
