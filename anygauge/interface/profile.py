"""What launchers and containers need to know of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anygauge.interface.images import ImageRelease


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchProfile:
    """What launchers and containers need to know of a device.

    Attributes:
        visibility_variable: names the devices that a process may see; None where there is none.
        image: container image with anygauge and what the device needs, which jobs run in; None
            where there is none.
        releases: what such images are built of, oldest first; empty where they are made elsewhere.
        container_flags: extra arguments for the container runtime, as Docker takes them.
        podman_flags: those that podman takes instead; None: the same.
        cluster_resource: resource name in a cluster scheduler, such as ``nvidia.com/gpu``.
        node_resources: further resources of a container with devices, name -> quantity.
        fabric: the network between machines that was asked for by name.
        fabric_resource: what a container must ask a cluster for to have it.
        capabilities: what containers must be allowed, such as ``IPC_LOCK``.
        binding: how agents bind ranks: ``cores`` gives each an equal share of whole cores; or
            ``none``.
    """

    visibility_variable: str | None = None
    image: str | None = None
    releases: tuple[ImageRelease, ...] = ()
    container_flags: tuple[str, ...] = ()
    podman_flags: tuple[str, ...] | None = None
    cluster_resource: str | None = None
    node_resources: Mapping[str, str] = field(default_factory=dict)
    fabric: str | None = None
    fabric_resource: str | None = None
    capabilities: tuple[str, ...] = ()
    binding: str = "none"
