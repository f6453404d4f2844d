"""A process that is alone; the conformance kit has what several ranks send each other."""

from __future__ import annotations

from typing import Any

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


def test_a_device_is_named_only_to_a_library_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def joined(name: str, **options: Any) -> None:
        given.append(options)
        raise InterruptedError

    monkeypatch.setattr("torch.distributed.init_process_group", joined)
    for binds in (False, True):
        alone = Collectives("cpu")
        alone.binds_device = binds
        with pytest.raises(InterruptedError):
            alone.open(
                rendezvous="file:///dev/null",
                rank=0,
                world_size=1,
                timeout_s=1.0,
                device=torch.device("cpu"),
            )
    assert ["device_id" in options for options in given] == [False, True]
