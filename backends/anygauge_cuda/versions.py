"""Versions of torch, CUDA and NVIDIA's driver that are known to go together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from anygauge.interface import read_releases

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
