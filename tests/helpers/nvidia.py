"""Installing the stand-in for CUDA and NCCL where a run finds it, and reading its record."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.fake_files import add_distribution, write_tree

STANDIN = Path(__file__).parents[1] / "standins/cuda"
NAME = "NVIDIA H100 80GB HBM3"
MACHINE: Mapping[str, str] = {
    "dev/nvidia0": "",
    "dev/nvidia1": "",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n",
    "proc/driver/nvidia/gpus/0000:3b:00.0/information": f"Model: \t\t {NAME}\n",
    "proc/driver/nvidia/gpus/0000:4b:00.0/information": f"Model: \t\t {NAME}\n",
    "torch/version.py": "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n",
}
"""What the driver and torch leave on a machine of two cards."""


def built() -> Path | None:
    """The cards' module, where it was built (make plugins)."""
    return next(STANDIN.glob("cuda_cards*.so"), None)


needs_cards = pytest.mark.skipif(
    built() is None, reason="the stand-in's tensors live on simulated cards (make plugins)"
)


def standin_site(folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` that holds the stand-in as an installed distribution; one that is
    there already is taken."""
    cards = built()
    assert cards is not None, "make plugins builds the cards"
    site = folder / "cuda-standin"
    if site.exists():
        return site
    shutil.copytree(STANDIN / "site", site, ignore=shutil.ignore_patterns("__pycache__"))
    (site / cards.name).symlink_to(cards)
    write_tree(site / "machine", MACHINE)
    entry = "[anygauge]\ncuda-standin = anygauge_cuda_standin\n"
    add_distribution(site, "cuda-standin", "1.0", entry)
    return site


def standin_environment(site: Path, record: Path) -> dict[str, str]:
    """Variables of a process that is to find the stand-in, and write its calls to `record`.RANK."""
    return {
        "PYTHONPATH": str(site),
        # The shipped announcement of the same backend, whose probe finds no card here.
        "ANYGAUGE_BLOCK_PLUGINS": "cuda",
        "CUDA_STANDIN_RECORD": str(record),
    }
