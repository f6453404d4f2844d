"""Published speeds, planned: those that fixed no constant are met, and so is how they scale."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from anygauge.registry import Registry
from tests.helpers.sizes import LLAMA_8B
from tests.planning.published import Published
from tests.planning.speeds import FITTED, REPORTED, Planned, TimedRun, planned

pytestmark = pytest.mark.slow

IMPAIRED = "mlperf-h100-8"
"""The same cluster is faster on each card with four machines, which no model of time explains."""


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Planned]:
    folder: Path = tmp_path_factory.mktemp("speeds")
    return {one.of.name: one for one in planned(REPORTED, folder, Registry.load())}


def test_halves_are_apart() -> None:
    assert not {one.name for one in FITTED} & {one.name for one in REPORTED}
    assert abs(len(FITTED) - len(REPORTED)) <= 1


def test_the_median_error_of_the_other_half(reported: dict[str, Planned]) -> None:
    assert statistics.median(abs(one.error) for one in reported.values()) <= 0.10


def test_runs_with_zero_of_a_70b(reported: dict[str, Planned]) -> None:
    # What a graph moves is fitted to the memory of a run with another attention.
    assert abs(reported["gaudi2-70b-lora"].error) < 0.35
    assert 0 < reported[IMPAIRED].error < 0.70
    assert abs(reported["mlperf-a100-64"].error) < 0.40


def scaled(of: TimedRun, machines: int, cards: int, folder: Path) -> float:
    """Speed of each card on several machines over that on one."""
    runs = [
        replace(of, of=replace(of.of, name=f"{of.name}-{ranks}", ranks=ranks))
        for ranks in (cards, machines * cards)
    ]
    one, several = planned(runs, folder, Registry.load())
    return several.tokens_per_s / one.tokens_per_s


def test_fsdp_scales_over_16_machines(tmp_path: Path) -> None:
    """torchtitan: 97% of 8 cards' speed on 128."""
    [of] = [one for one in (*FITTED, *REPORTED) if one.name == "torchtitan-8b-8"]
    assert scaled(of, 16, 8, tmp_path) == pytest.approx(0.97, abs=0.06)


def test_ddp_of_an_adapter_on_three_machines_is_three_times_as_fast(tmp_path: Path) -> None:
    """Azure's example: LoRA of an 8B model on 1 to 3 machines of V100."""
    of = Published(
        name="v100",
        config=LLAMA_8B,
        card="v100-32",
        ranks=8,
        where="Azure's example",
        length=512,
        strategy={"name": "ddp"},
        precision={"param_dtype": "float16"},
    )
    run = TimedRun(of=of, machine="Standard_ND40rs_v2", tokens_per_s=1)
    assert 3 * scaled(run, 3, 8, tmp_path) == pytest.approx(3, abs=0.15)
