"""Where ``precision.fp8`` is refused, before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import FULL, Backend, UnsupportedError
from anygauge.planning.plan import plan_run
from anygauge.registry import Registry
from anygauge.training.strategy import FP8 as CAPABILITY
from anygauge.training.strategy import check_fp8
from tests.helpers.runs import run_file

FP8 = {"precision": {"fp8": True, "param_dtype": "bfloat16"}}


class Able(Backend):
    name = "able"
    device_type = "cpu"
    capabilities = {CAPABILITY: FULL, "bfloat16": FULL}


def run(tmp_path: Path, **changes: Any) -> RunFile:
    return load_run_file(run_file(tmp_path, **{**FP8, **changes}))


def check(asked: RunFile, backend: Backend) -> None:
    check_fp8(asked, Registry.load().find_strategy(asked.strategy.name).spec, backend)


@pytest.mark.parametrize(
    "strategy", [{"name": "single"}, {"name": "zero"}, {"name": "zero", "stage": 1}]
)
def test_it_is_taken_where_it_was_tried(tmp_path: Path, strategy: Mapping[str, Any]) -> None:
    check(run(tmp_path, strategy=strategy), Able())


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_device_without_it_says_why(tmp_path: Path, name: str) -> None:
    asked = run(tmp_path, strategy={"name": "single"})
    with pytest.raises(UnsupportedError, match=rf"backend '{name}' lacks 'fp8_products'.*gradient"):
        check(asked, Registry.load().create_backend(name))
    check(run(tmp_path, precision={"fp8": False}), Registry.load().create_backend(name))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"name": "fsdp"}}, "'fsdp': nobody has tried.*Use strategy.name: zero"),
        ({"strategy": {"name": "ddp"}}, "'ddp': nobody has tried"),
        ({"strategy": {"name": "zero", "offload": "optimizer"}}, "not tried with weights or state"),
        ({"adapter": {"r": 4, "dora": True}}, "and adapter.dora: DoRA.*Leave adapter.dora out"),
        ({"adapter": {"r": 4, "modules_to_save": ["lm_head"]}}, "and adapter.modules_to_save"),
    ],
    ids=["fsdp", "ddp", "offload", "dora", "modules_to_save"],
)
def test_what_does_not_go_with_it_is_named(
    tmp_path: Path, changes: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"precision.fp8.*{said}"):
        check(run(tmp_path, **changes), Able())


def test_it_cannot_be_planned(tmp_path: Path) -> None:
    registry = Registry.load()
    asked = run(tmp_path, strategy={"name": "single"})
    with pytest.raises(
        UnsupportedError, match=r"precision.fp8: .* cannot be planned. Plan without"
    ):
        plan_run(asked, registry, registry.create_backend("cpu"), 1)
