"""What is answered of values that are not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from anygauge.planning.live import LiveBytes
from anygauge.planning.valueless import without_values
from torch import Tensor

QUESTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda mask: mask.all(),
    "as many as there are": lambda mask: mask.sum() == mask.numel(),
}


@pytest.mark.parametrize("question", list(QUESTIONS))
@pytest.mark.parametrize("padded", [False, True])
def test_whether_all_of_a_mask_is_set(question: str, padded: bool) -> None:
    """As models ask, whose libraries make no mask where they need none."""
    with without_values(padded=padded) as answers, LiveBytes("cpu") as live:
        live.answers = answers
        mask = torch.ones(2, 5000, dtype=torch.long).bool()
        for _ in range(2):  # the second time it may be known
            assert bool(QUESTIONS[question](mask)) is not padded
        assert not bool(mask.sum() == mask.numel() - 1), "that is another question"
