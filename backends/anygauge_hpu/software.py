"""Gaudi's software as its packages show it, and which versions are known to belong together.

Everything here is read from installed metadata; nothing is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from anygauge.interface import ImageRelease, read_releases

PLUGIN = "habana-torch-plugin"
"""The distribution that brings the device to torch. It comes with Intel's image or from Intel's
own archive; it is on no public package index."""

PACKAGE = "habana_frameworks"


RELEASES = read_releases(Path(__file__).with_name("releases.json"))
"""Releases of Gaudi's software, oldest first, named as Intel does: ``1.23.0``."""

LAZY_BY_DEFAULT_BEFORE = (1, 21)
"""The release that made eager mode, with torch.compile, the default (Gaudi-tutorials, PR 154)."""


def installed_version(distribution: str) -> str | None:
    """A distribution's version, or None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_missing() -> str | None:
    """Why Gaudi's software cannot be used here, or None; for kernels."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed: it comes with Intel's container image"
    return None


def release_of(version: str | None) -> ImageRelease | None:
    """The known release that a plugin's version belongs to: the one of its three numbers, else the
    newest of its first two; None for an unknown one.
    """
    pair = major_minor(version)
    alike = [r for r in RELEASES if pair and major_minor(r.name) == pair]
    return next((r for r in alike if is_of(version, r)), alike[-1] if alike else None)


def is_of(version: str | None, release: ImageRelease) -> bool:
    """Whether a plugin's version, such as ``1.24.1.482``, has all numbers of a release."""
    return f"{version}.".startswith(f"{release.name}.")


def major_minor(version: str | None) -> tuple[int, int] | None:
    """``1.23.0.695`` is (1, 23); None for what is not a version."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def built_for(deepspeed: str) -> str | None:
    """The release that a build of DeepSpeed is Intel's for; None for a build that is not Intel's.

    Intel's builds are versions such as ``0.16.1+hpu.synapse.v1.21.0``.
    """
    match = re.search(r"\+hpu\.synapse\.v(\d+\.\d+\.\d+)", deepspeed)
    return match[1] if match else None


def is_fork(torch_version: str) -> bool:
    """Whether a torch is Intel's own build, which lazy mode needs: its local part says so.

    Source: gaudi-pytorch-bridge 1.19.0, habana_frameworks/torch/__init__.py, for ``git``; later
    releases report themselves as ``2.6.0+hpu_1.20.0-543.git4952fce``, too.
    """
    return torch_version.partition("+")[2].startswith(("git", "hpu"))
