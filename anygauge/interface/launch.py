"""What launchers and containers need to know of a device: its profile, and its images."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "REPOSITORY_VARIABLE",
    "ImageRelease",
    "LaunchProfile",
    "own_image",
    "read_releases",
    "tagged",
]


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
    capabilities: tuple[str, ...] = ()
    binding: str = "none"


REPOSITORY_VARIABLE = "ANYGAUGE_REPOSITORY"
"""Where the images that you built are, such as ``registry.example.com/team/anygauge``."""

_REPOSITORY = "anygauge"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRelease:
    """One set of versions that go together, and the image that is made of it.

    Attributes:
        name: the end of the image's tag, such as a vendor's release.
        base: the image it is built on, with its tag.
        built: whether there is an image of it; else `note` says why not.
        image: its whole name, where it is not built from anygauge's sources.
        versions: what is in it, package -> version.
        goes_with: what its maker names besides, which the image may lack, package -> version.
        source: where these facts are from.
        note: what is left out, or why there is no image.
    """

    name: str
    base: str
    built: bool = True
    image: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    goes_with: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    note: str = ""


def read_releases(file: Path) -> tuple[ImageRelease, ...]:
    """A backend's table of releases, oldest first, as docker's bake reads it, too.

    Args:
        file: JSON with one entry under ``variable``, whose ``default`` is the list of rows.
    """
    (table,) = json.loads(file.read_text(encoding="utf-8"))["variable"].values()
    return tuple(map(_release, table["default"]))


def own_image(backend: str, releases: tuple[ImageRelease, ...]) -> str:
    """The name of a backend's newest image that is built from anygauge's sources.

    It is in the repository that `REPOSITORY_VARIABLE` names.
    """
    return tagged(backend, [one for one in releases if one.built][-1])


def tagged(backend: str, release: ImageRelease) -> str:
    """The name of a release's image, such as ``anygauge:0.1.0-cpu-torch-2.13``."""
    if release.image is not None:
        return release.image
    repository = os.environ.get(REPOSITORY_VARIABLE) or _REPOSITORY
    from importlib.metadata import PackageNotFoundError, version  # longer than all the rest

    try:
        own = version("anygauge")
    except PackageNotFoundError:  # run from sources that are not installed
        own = "dev"
    return f"{repository}:{own}-{backend}-{release.name}"


def _release(row: Mapping[str, Any]) -> ImageRelease:
    return ImageRelease(
        name=row["release"],
        base=row["base"],
        built=row["image"],
        versions=row["versions"],
        goes_with=row.get("goes_with", {}),
        source=row["source"],
        note=row.get("note", ""),
    )
