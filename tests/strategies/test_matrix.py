"""Every strategy against `single` on the same rows: losses, norms, weights, bytes sent and held."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.strategies.parity_rank import Case

Result = dict[str, Any]

NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}
ALL = {"lora": False}
SGD = {"optimizer": "sgd"}
GATHERED = {"cp": 2}
ULYSSES = {"cp": 2, "cp_method": "ulysses"}
TWO = [
    Case(strategy="ddp"),
    Case(strategy="ddp", **ALL, **SGD),
    Case(strategy="ddp", dtype="bfloat16"),
    Case(strategy="fsdp"),
    Case(strategy="fsdp", recomputed=True, **SGD),
    Case(strategy="fsdp", **ALL, **SGD),
    Case(strategy="fsdp", options={"gather": "step"}),
    Case(strategy="fsdp", options={"offload": "both"}),
    Case(strategy="fsdp", dtype="bfloat16"),
    Case(strategy="ddp", packed=True, **SGD),
    Case(strategy="ddp", options=GATHERED, packed=True, **SGD),
    Case(strategy="ddp", options=ULYSSES, **ALL, **SGD),
    Case(strategy="fsdp", options=GATHERED, recomputed=True, **SGD),
    Case(strategy="fsdp", options=GATHERED, **ALL, **SGD),
    Case(strategy="fsdp", options=ULYSSES, packed=True, recomputed=True, **SGD),
    Case(strategy="zero", packed=True, **SGD),
    *(Case(strategy="zero", options={"stage": stage}) for stage in range(4)),
    *(Case(strategy="zero", options={"stage": stage}, **ALL, **SGD) for stage in range(4)),
    Case(strategy="zero", options={"stage": 3, "options": NOTHING_RESIDENT}, recomputed=True),
    Case(strategy="zero", options={"stage": 2, "offload": "optimizer"}, **ALL, **SGD),
    Case(strategy="zero", options={"stage": 3, "offload": "both"}),
]
FOUR = [
    Case(strategy="ddp", **SGD),
    Case(strategy="fsdp", **SGD),
    Case(strategy="fsdp", options={"dp_replicate": 2}, **SGD),
    Case(strategy="fsdp", options={"dp_replicate": 2}, recomputed=True, **ALL, **SGD),
    Case(strategy="fsdp", options={"dp_replicate": 2, "gather": "step"}),
    Case(strategy="fsdp", options={"dp_shard": 4, "offload": "both"}, **ALL),
    Case(strategy="ddp", options=GATHERED, **SGD),
    Case(strategy="fsdp", options=GATHERED, packed=True, **ALL, **SGD),
    Case(strategy="fsdp", options={"cp": 2, "dp_replicate": 2}, **SGD),
    Case(strategy="fsdp", options={"cp": 4, "cp_method": "ulysses"}, packed=True, **SGD),
    Case(strategy="zero", options={"stage": 3, "options": {"zero_hpz_partition_size": 2}}, **SGD),
    Case(
        strategy="zero",
        options={"stage": 3, "options": {"zero_hpz_partition_size": 2, **NOTHING_RESIDENT}},
        **ALL,
        **SGD,
    ),
    Case(strategy="zero", options={"stage": 3, "offload": "parameters"}, **ALL, **SGD),
]
A_FEW_NUMBERS = 64
"""Bytes of norms and flags in a step, which no footprint speaks of."""


def results(world: int, cases: Sequence[Case], folder: Path) -> list[Result]:
    output = folder / f"{world}.json"
    run_ranks(
        "tests.strategies.parity_rank",
        [str(output), json.dumps([dataclasses.asdict(case) for case in cases])],
        world=world,
        folder=folder,
    )
    found: list[Result] = json.loads(output.read_text())
    return found


class Matrix:
    """The results of cases, and those of the reference on the same rows."""

    def __init__(self, world: int, cases: Sequence[Case], folder: Path) -> None:
        alone = list(dict.fromkeys(json.dumps(dataclasses.asdict(c.alone())) for c in cases))
        references = results(1, [Case(**json.loads(each)) for each in alone], folder)
        self._references = dict(zip(alone, references, strict=True))
        self._found = dict(
            zip([case.name for case in cases], results(world, cases, folder), strict=True)
        )

    def pair(self, case: Case) -> tuple[Result, Result]:
        """(Of the case, of the reference.)"""
        alone = json.dumps(dataclasses.asdict(case.alone()))
        return self._found[case.name], self._references[alone]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(4, FOUR, tmp_path_factory.mktemp("four"))


def is_the_references(case: Case, found: Result, wanted: Result) -> None:
    exact = case.dtype == "float32"
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5 if exact else 1e-3)
    assert found["evaluation"] == pytest.approx(wanted["evaluation"], rel=1e-5 if exact else 1e-3)
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-6 if exact else 1e-2)
    assert found["logits"] == pytest.approx(wanted["logits"], abs=1e-4 if exact else 2e-2)
    assert found["trained"].keys() == wanted["trained"].keys()
    if case.optimizer == "sgd":
        # AdamW divides a float32's noise by itself, so there norms and weights part slowly.
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        for name, values in found["trained"].items():
            assert values == pytest.approx(wanted["trained"][name], abs=1e-6), name


def sends_what_it_says(case: Case, found: Result) -> None:
    said = found["footprint"]["sent"]
    sent = {name: size for name, size in found["bytes"].items() if size > A_FEW_NUMBERS}
    assert sent.keys() == said.keys()
    for name, size in sent.items():
        # DeepSpeed keeps some gathered weights from forward to backward.
        least = 0.5 * said[name] if "options" in case.options else said[name]
        assert least <= size <= said[name] + A_FEW_NUMBERS, name


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_on_two_ranks(case: Case, two: Matrix) -> None:
    found, wanted = two.pair(case)
    is_the_references(case, found, wanted)
    sends_what_it_says(case, found)
    if case.strategy != "zero":  # whose parameters show no shards
        # What is kept whole from forward to backward is not held from step to step.
        assert found["held"] == found["footprint"]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_on_four_ranks(case: Case, four: Matrix) -> None:
    found, wanted = four.pair(case)
    is_the_references(case, found, wanted)
    sends_what_it_says(case, found)
    if case.strategy != "zero":
        assert found["held"] == found["footprint"]["weights"]
