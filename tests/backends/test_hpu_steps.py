"""Whole steps on the stand-in for Gaudi, counted: what is compiled, copied and left to the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gaudi_census import SCENARIOS, Part, counted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("anygauge_sim") is None,
    reason="the stand-in's tensors live on simulated cards (make plugins)",
)

FIRST = ("step 1", "step 2", "evaluation 1")
"""DeepSpeed fetches weights ahead from the second step on."""
ROUND = ("step 3", "step 4", "evaluation 2")
LATER_ROUNDS = ("step 5", "step 6", "evaluation 3", "step 7", "step 8", "evaluation 4")
COPIES = {"step 1": 0, "step 2": 1, "evaluation 1": 2}
"""A step's numbers are read in the next one, or by the evaluation, which reads its loss too."""


def check(ranks: Sequence[Sequence[Part]], *, packed: bool) -> None:
    """Nothing is compiled but what has a new width, and the host neither reads nor computes more
    than it should."""
    rounds = ROUND if packed else ROUND + LATER_ROUNDS
    for found in ranks:
        *whole, end = found
        assert [part.name for part in whole] == [*FIRST, *rounds] and end.name == "end"
        assert [part.new > 0 for part in whole[:3]] == [True] * 3
        of_steps, of_evaluations = set(whole[1].widths), set(whole[2].widths)
        for part in whole[3:]:
            seen = of_steps if part.name.startswith("step") else of_evaluations
            assert (part.new == 0) == (part.widths <= seen), part
            seen |= part.widths
        copies = [part.copies["anygauge"] for part in whole]
        assert copies == list(COPIES.values()) * (len(whole) // 3)
        assert [(part.fallbacks, part.unproven) for part in whole] == [(0, 0)] * len(whole)
        if packed:
            assert of_steps == {2048} and len(of_evaluations) == 1
        else:
            # The test can fail: there is a width that comes again, and one that comes late.
            assert len(of_steps) > 1
    assert all([p.widths for p in found] == [p.widths for p in ranks[0]] for found in ranks)


def test_a_run_with_packing_compiles_nothing_after_its_first_evaluation(tmp_path: Path) -> None:
    check(counted(tmp_path, "8b-packed", "lazy", layers=2), packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile"])
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_each_width_is_compiled_once(name: str, mode: str, tmp_path: Path) -> None:
    check(counted(tmp_path, name, mode), packed=name != "8b")
