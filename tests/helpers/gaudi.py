"""Installing the stand-in for Gaudi's software where a run finds it, and reading its record."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.fake_files import add_distribution

STANDIN = Path(__file__).parents[1] / "standins/gaudi"
needs_cards = pytest.mark.skipif(
    importlib.util.find_spec("anygauge_sim") is None,
    reason="the stand-in's tensors live on simulated cards (make plugins)",
)
without_driver = pytest.mark.skipif(
    Path("/sys/module/habanalabs").exists(), reason="this machine has Gaudi's driver"
)


def standin_site(folder: Path, version: str = "1.20.0") -> Path:
    """A folder for ``PYTHONPATH`` that holds the stand-in as two installed distributions; one that
    is there already is taken."""
    site = folder / f"standin-{version}"
    if site.exists():
        return site
    shutil.copytree(STANDIN, site, ignore=shutil.ignore_patterns("__pycache__"))
    autoload = "[torch.backends]\ndevice_backend = habana_frameworks.autoload:__autoload\n"
    add_distribution(site, "habana-torch-plugin", version, autoload)
    add_distribution(
        site, "gaudi-standin", "1.0", "[anygauge]\nhpu-standin = anygauge_hpu_standin\n"
    )
    return site


def standin_environment(site: Path, record: Path) -> dict[str, str]:
    """Variables of a process that is to find the stand-in, and write its calls to `record`.RANK."""
    return {
        # What finds the sources under test stays there.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
        # The shipped announcement of the same backend, whose probe finds no card here.
        "ANYGAUGE_BLOCK_PLUGINS": "hpu",
        "ANYGAUGE_SIM_LOCKS": "",
        "HABANA_STANDIN_RECORD": str(record),
    }


def calls(record: Path, rank: int) -> list[list[Any]]:
    """What a rank called, in order: name and values."""
    text = Path(f"{record}.{rank}").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def library_adamw() -> Callable[..., Any]:
    """The backend's kernel ``adamw`` over the stand-in's, on tensors of any device."""
    name = "habana_frameworks.torch.hpex.optimizers"
    spec = importlib.util.spec_from_file_location(
        name, STANDIN / Path(*name.split(".")) / "__init__.py"
    )
    assert spec is not None and spec.loader is not None
    optimizers = importlib.util.module_from_spec(spec)
    outside = dict.fromkeys(
        ("habana_standin", "habana_frameworks", "habana_frameworks.torch.core"), mock.MagicMock()
    )
    with mock.patch.dict(sys.modules, {**outside, name: optimizers}):
        spec.loader.exec_module(optimizers)
        from anygauge_hpu.gaudi_kernels import fused_adamw

        return fused_adamw()


def intels_deepspeed(folder: Path, checkout: Path, release: str) -> Path:
    """A folder for ``PYTHONPATH`` that holds a checkout of Intel's DeepSpeed as if installed.

    Everything is Python but its operators, which are compiled when they are first asked for. The
    checkout is only read: what its ``setup.py`` would write into it, its version and that no
    operator was built ahead, is written into the copy.

    Args:
        release: the release of Gaudi's software that the build is for, such as ``1.21.0``.
    """
    site = folder / f"intels-deepspeed-{release}"
    # Links to folders beside it, such as the accelerators', become folders.
    shutil.copytree(
        checkout / "deepspeed",
        site / "deepspeed",
        ignore=shutil.ignore_patterns("__pycache__", "csrc"),
    )
    number = (checkout / "version.txt").read_text(encoding="utf-8").strip()
    version = f"{number}+hpu.synapse.v{release}"
    torch_info = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0")
    written = {
        "version": version,
        "git_hash": "unknown",
        "git_branch": "unknown",
        "installed_ops": {},
        "accelerator_name": "hpu",
        "torch_info": {**torch_info, "bf16_support": False},
    }
    (site / "deepspeed/git_version_info_installed.py").write_text(
        "".join(f"{name} = {value!r}\n" for name, value in written.items()), encoding="utf-8"
    )
    add_distribution(site, "deepspeed", version)
    return site
