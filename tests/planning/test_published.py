"""Published runs, planned: what fits does, what does not is refused, and figures are met."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.planning.fit import Fit
from anygauge.planning.memory import RunMemory
from anygauge.registry import Registry
from tests.planning.published import BY_NAME, GB, GIB, RUNS, Published, planned

Plan = Callable[[str], tuple[RunMemory, Fit]]
OTHER_ENGINES = {
    "gaudi2-70b-lora": "its workspace of graphs has no formula, and is counted",
    "peft-70b-fsdp": "FSDP1, which gathers further ahead than FSDP2",
    "torchtune-70b": "layers are compiled; without, more is kept for backward",
}
"""Runs whose figure is of an engine that is not ours, and why it differs."""
LONG_LOGITS = {
    f"qwen-72b-{length}": "their loss is of bfloat16 logits, ours of float32"
    for length in (4096, 8192)
}
"""Runs of which more is needed by up to a fifth."""
JUST_OVER = "qwen-72b-8192"
"""Of these, one lacks a little of its card."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder: Path = tmp_path_factory.mktemp("published")
    registry = Registry.load()

    @functools.cache
    def found(name: str) -> tuple[RunMemory, Fit]:
        return planned(BY_NAME[name], folder, registry)

    return found


def named(of: Published) -> str:
    return of.name


@pytest.mark.parametrize("of", RUNS, ids=named)
def test_what_is_said_to_fit_fits(of: Published, plan: Plan) -> None:
    left = plan(of.name)[1].left
    if of.name == JUST_OVER:
        assert -GIB < left < 0
    else:
        assert (left >= 0) == of.fits


@pytest.mark.parametrize(
    "of", [of for of in RUNS if of.said is not None and of.name not in OTHER_ENGINES], ids=named
)
def test_within_a_tenth_and_hardly_under(of: Published, plan: Plan) -> None:
    assert of.said is not None
    most = 1.20 if of.name in LONG_LOGITS else 1.10
    assert 0.97 <= plan(of.name)[1].needed / of.said <= most


def test_all_weights_of_70b(plan: Plan) -> None:
    """140 GB of weights, 140 of gradients, 840 of masters and moments."""
    held = plan("gaudi2-70b-full")[0].held
    total = {name: 8 * size / (140 * GB) for name, size in held.items()}
    assert total["weights"] == pytest.approx(1, rel=0.03)
    assert total["gradients"] == pytest.approx(1, rel=0.03)
    assert total["masters"] + total["optimizer"] == pytest.approx(6, rel=0.03)
