"""What a placement answers of the order of work: pinned memory, events, whether it works ahead."""

from __future__ import annotations

import json
from pathlib import Path
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


def test_a_profile_has_each_allocation_where_the_device_records_them(tmp_path: Path) -> None:
    asked: list[Any] = []

    def dump(path: str) -> None:
        asked.append("dump")
        Path(path).write_bytes(b"history")

    memory = SimpleNamespace(
        _record_memory_history=lambda **given: asked.append(given), _dump_snapshot=dump
    )
    module = {
        **{"synchronize": lambda: asked.append("wait"), "memory": memory},
        **{"memory_allocated": lambda: 3, "max_memory_allocated": lambda: 5},
    }
    with Queued(True, **module).profile(tmp_path):
        torch.ones(8) @ torch.ones(8)
    assert asked == [{"max_entries": 100_000}, "wait", "wait", "dump", {"enabled": None}]
    names = {"memory.json", "memory.pickle", "trace.json.gz"}
    assert {each.name for each in tmp_path.iterdir()} == names
    table = json.loads((tmp_path / "memory.json").read_text())
    assert (table["unit"], table["after"]["in_use"], table["after"]["peak"]) == ("bytes", 3, 5)
    assert sum(each["bytes"] for each in table["host_operations"]) >= 2 * 8 * 4


def test_the_history_is_written_also_where_memory_ran_out(tmp_path: Path) -> None:
    written: list[str] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **_: None, _dump_snapshot=lambda path: written.append(path)
    )
    module = {"memory": memory, "synchronize": lambda: None, "memory_allocated": lambda: 0}
    placement = Queued(True, **module, max_memory_allocated=lambda: 0)
    with pytest.raises(torch.OutOfMemoryError), placement.profile(tmp_path):
        raise torch.OutOfMemoryError
    assert written == [str(tmp_path / "memory.pickle")]
    assert not (tmp_path / "trace.json.gz").exists()
