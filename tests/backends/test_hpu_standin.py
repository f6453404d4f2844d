"""The stand-in for Gaudi's software beside the source that it was made from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.gaudi import STANDIN
from tests.standins.signatures import differences

SOURCE = os.environ.get("ANYGAUGE_GAUDI_SOURCE")
"""A checkout of HabanaAI/gaudi-pytorch-bridge of release 1.19."""

CHANGES = {
    "an argument more": (
        "torch/hpu/__init__.py",
        "def synchronize()",
        "def synchronize(device=None)",
        "habana_frameworks.torch.hpu.synchronize: (device=None), there ()",
    ),
    "another default": (
        "torch/core/step_closure.py",
        'def mark_step(device_str="", sync=False)',
        'def mark_step(device_str="", sync=True)',
        "habana_frameworks.torch.core.step_closure.mark_step: (device_str='', sync=True), there",
    ),
    "a method's argument": (
        "torch/hpex/normalization/__init__.py",
        "gamma, eps",
        "weight, eps",
        "FusedRMSNorm.forward: (ctx, data_in, weight, eps,",
    ),
    "a function that is absent there": (
        "torch/hpu/memory.py",
        "def memory_summary(",
        "def empty_cache(",
        "habana_frameworks.torch.hpu.memory.empty_cache: there is no such function",
    ),
    "a wrapper of torch": (
        "torch/core/__init__.py",
        "backend=None, pg_options=None)",
        "backend=None, pg_options=None, group_desc=None)",
        "habana_frameworks.torch.core.wrap_new_group:",
    ),
}


@pytest.fixture(scope="module")
def source() -> Path:
    if SOURCE is None:
        pytest.skip("ANYGAUGE_GAUDI_SOURCE names no checkout of gaudi-pytorch-bridge")
    return Path(SOURCE) / "python_packages"


def test_names_and_arguments_are_those_of_the_source(source: Path) -> None:
    assert differences(STANDIN, source) == []


@pytest.mark.parametrize("case", CHANGES)
def test_a_difference_is_found(source: Path, tmp_path: Path, case: str) -> None:
    name, before, after, said = CHANGES[case]
    shutil.copytree(STANDIN, tmp_path / "changed")
    file = tmp_path / "changed/habana_frameworks" / name
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after), encoding="utf-8")
    found = differences(tmp_path / "changed", source)
    assert [line for line in found if said in line], found
