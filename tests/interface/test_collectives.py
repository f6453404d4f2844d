"""A process that is alone; the conformance kit has what several ranks send each other."""

from __future__ import annotations

import pytest
import torch

from anygauge.interface import Collectives


def test_who_is_alone_gets_its_own_values() -> None:
    alone = Collectives("cpu")
    assert alone.sum_on_host([2.5]) == [2.5]
    assert alone.gather_objects("me") == ["me"] and alone.gather_bytes(b"me") == [b"me"]


def test_an_operation_that_there_is_not_is_refused_before_anyone_waits() -> None:
    with pytest.raises(ValueError, match="'product' is none of"):
        Collectives("cpu").all_reduce(torch.ones(1), "product")
