"""Container images that a backend's table of releases describes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["REPOSITORY_VARIABLE", "ImageRelease", "image_tag", "own_image", "read_releases"]

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
        goes_with: what its maker also names, which the image may lack, package -> version.
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
    """A backend's table of releases, of which the last is the default.

    Args:
        file: TOML, as a rule the one that describes the cards, too: each ``[[release]]`` has the
            fields of `ImageRelease`, and ``arguments`` for the build of the image.
    """
    rows = tomllib.loads(file.read_text(encoding="utf-8")).get("release", ())
    return tuple(ImageRelease(**{k: row[k] for k in row if k != "arguments"}) for row in rows)


def own_image(backend: str, releases: tuple[ImageRelease, ...]) -> str:
    """The name of a backend's newest image that is built from anygauge's sources."""
    return image_tag(backend, [one for one in releases if one.built][-1])


def image_tag(backend: str, release: ImageRelease) -> str:
    """The name of a release's image, such as ``anygauge:0.2.0-cpu-torch-2.13``."""
    if release.image is not None:
        return release.image
    repository = os.environ.get(REPOSITORY_VARIABLE) or _REPOSITORY
    from importlib.metadata import PackageNotFoundError, version  # longer than all the rest

    try:
        own = version("anygauge")
    except PackageNotFoundError:  # run from sources that are not installed
        own = "dev"
    return f"{repository}:{own}-{backend}-{release.name}"
