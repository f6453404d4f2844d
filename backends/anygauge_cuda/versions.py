"""Versions of torch, CUDA and NVIDIA's driver that are known to go together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from anygauge.interface import read_releases

TORCH_BUILDS: Mapping[str, tuple[str, ...]] = {
    "2.6": ("11.8", "12.4", "12.6"),
    "2.7": ("11.8", "12.6", "12.8"),
    "2.8": ("12.6", "12.8", "12.9"),
    "2.9": ("12.6", "12.8", "13.0"),
    "2.10": ("12.6", "12.8", "13.0"),
    "2.11": ("12.6", "12.8", "13.0"),
    "2.12": ("12.6", "13.0", "13.2"),
    "2.13": ("12.6", "13.0", "13.2"),
    "2.14": ("12.6", "13.0", "13.2"),
}
"""Torch -> versions of CUDA that its wheels are published for (pytorch.org: previous versions;
PyTorch's RELEASE.md; the local parts of the wheels' versions, such as ``+cu126``)."""

OLDEST_DRIVER: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""CUDA major version -> oldest driver branch (NVIDIA CUDA Compatibility, minor versions)."""


RELEASES = read_releases(Path(__file__).with_name("releases.json"))
"""What images are built of."""


def driver_serves(driver: str, cuda: str) -> bool | None:
    """Whether a driver such as ``550.54.15`` serves CUDA such as ``12.8``; None if unknown."""
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest is None:
        return None
    return int(driver.split(".")[0]) >= oldest


def published_builds(torch: str) -> tuple[str, ...] | None:
    """CUDA versions that a torch such as ``2.13.0+cu130`` is published for; None if unknown."""
    found = re.match(r"(\d+\.\d+)(\.|$)", torch)
    return TORCH_BUILDS.get(found.group(1)) if found else None


def has_kernels(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Whether a card runs what torch was built for (``torch.cuda.get_arch_list``).

    Code for ``sm_86`` runs on cards of the same major version and no smaller minor one;
    ``compute_86``, compiled when it is loaded, on all that are not smaller (CUDA C++ guide).
    """
    found = (re.match(r"(sm|compute)_(\d+)(\d)", name) for name in built)
    return any(
        (int(each[2]), int(each[3])) <= capability
        and (each[1] == "compute" or int(each[2]) == capability[0])
        for each in found
        if each
    )
