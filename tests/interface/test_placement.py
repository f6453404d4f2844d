"""What a placement answers of the order of work: pinned memory, events, whether it works ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.interface import Placement


class Queued(Placement):
    """A device in the host's memory, with a device module of its own."""

    def __init__(self, pinned: bool, **module: Any) -> None:
        super().__init__("cpu")
        self.pinned_memory = pinned
        self.chosen: list[torch.device] = []
        self._device = torch.device("cpu")
        self._functions = SimpleNamespace(set_device=self.chosen.append, **module)

    def _module(self) -> Any:
        return self._functions


def test_memory_is_asked_for_once_a_step_and_its_limit_once() -> None:
    asked: list[str] = []

    def stats() -> dict[str, int]:
        asked.append("stats")
        kinds = {"allocated_bytes": (5, 7), "reserved_bytes": (8, 9)}
        return {
            f"{kind}.all.{what}": value
            for kind, values in kinds.items()
            for what, value in zip(("current", "peak"), values, strict=True)
        }

    def info() -> tuple[int, int]:
        asked.append("driver")
        return 1, 100

    placement = Queued(True, memory_stats=stats, mem_get_info=info)
    for _ in range(3):
        found = placement.memory()
        assert (found.in_use, found.peak, found.reserved, found.limit) == (5, 7, 8, 100)
    assert asked == ["driver", "stats", "stats", "stats"]


@pytest.mark.parametrize(
    ("pinned", "module", "wanted"),
    [
        (True, {"Event": SimpleNamespace}, True),
        (False, {"Event": SimpleNamespace}, False),
        (True, {}, False),
    ],
)
def test_it_works_ahead_with_events_that_measure_time_and_pinned_memory(
    pinned: bool, module: dict[str, Any], wanted: bool
) -> None:
    placement = Queued(pinned, **module)
    assert placement.works_ahead is wanted
    if wanted:
        assert placement.event() == SimpleNamespace(enable_timing=True)


def test_pinning_names_the_device_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    placement = Queued(True)
    batch = {"ids": torch.zeros(2), "more": {"mask": torch.ones(2)}, "origin": "rows:1"}
    found = placement.pin(batch)
    assert found["ids"].tolist() == [1, 1] and found["more"]["mask"].tolist() == [2, 2]
    assert found["origin"] == "rows:1"
    assert placement.chosen == [torch.device("cpu")] * 2
    unpinned = Queued(False)
    assert unpinned.pin(batch)["ids"] is batch["ids"] and not unpinned.chosen
