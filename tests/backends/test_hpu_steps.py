"""Whole steps on the stand-in for Gaudi, counted: what is compiled, copied and left to the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gaudi_census import SCENARIOS, CensusPart, counted
from tests.helpers.gaudi import needs_cards

pytestmark = needs_cards

FIRST = ("step 1", "step 2", "evaluation 1")
"""DeepSpeed fetches weights ahead from the second step on."""
ROUND = ("step 3", "step 4", "evaluation 2")
LATER_ROUNDS = ("step 5", "step 6", "evaluation 3", "step 7", "step 8", "evaluation 4")
COPIES = {"step 1": 0, "step 2": 1, "evaluation 1": 2}
"""A step's numbers are read in the next one, or by the evaluation, which reads its loss too."""


def check(ranks: Sequence[Sequence[CensusPart]], *, packed: bool) -> None:
    """Nothing is compiled after the second step and the first evaluation, and the host neither
    reads nor computes more than it should."""
    rounds = ROUND if packed else ROUND + LATER_ROUNDS
    for found in ranks:
        *whole, end = found
        assert [part.name for part in whole] == [*FIRST, *rounds] and end.name == "end"
        assert [part.new > 0 for part in whole[:3]] == [True] * 3
        assert [(part.name, part.new) for part in whole[3:]] == [(name, 0) for name in rounds]
        later = set.union(*(part.widths for part in whole[3:] if part.name.startswith("step")))
        assert whole[0].widths == whole[1].widths >= later
        copies = [part.copies["anygauge"] for part in whole]
        assert copies == list(COPIES.values()) * (len(whole) // 3)
        assert [(part.fallbacks, part.unproven) for part in whole] == [(0, 0)] * len(whole)
        if packed:
            assert whole[0].widths == later == {2048} and len(whole[2].widths) == 1
        else:
            # The test can fail: steps have several widths.
            assert len(later) > 1
    assert all([p.widths for p in found] == [p.widths for p in ranks[0]] for found in ranks)


def test_a_run_with_packing_compiles_nothing_after_its_first_evaluation(tmp_path: Path) -> None:
    check(counted(tmp_path, "8b-packed", "lazy", layers=2), packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile"])
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_nothing_is_compiled_after_the_first_evaluation(
    name: str, mode: str, tmp_path: Path
) -> None:
    found = counted(tmp_path, name, mode)
    if (name, mode) == ("8b-narrow", "compile"):
        # Its evaluations have two widths: when torch.compile meets the second, it compiles layers
        # with the width as an argument, and the first width is new once more in the next one.
        for rank in found:
            (second,) = (part for part in rank if part.name == "evaluation 2")
            assert second.new > 0 and len(second.widths) == 2
            second.new = 0
    check(found, packed=name not in ("8b", "8b-narrow"))


@pytest.mark.slow
def test_without_a_warm_up_a_late_width_is_compiled_late(tmp_path: Path) -> None:
    for found in counted(tmp_path, "8b", "lazy", layers=2, warm_up=False):
        of_steps = [part for part in found if part.name.startswith("step")]
        assert of_steps[0].widths == {2048} and of_steps[1].widths == {1792}
        late = [part.name for part in of_steps[2:] if part.new]
        assert late == ["step 6"] and of_steps[5].widths == {2048}
