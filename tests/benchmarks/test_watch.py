"""What is watched in a run's last steps: waits that torch warns of, and how busy the device is."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.processes import SHIM

sys.path.insert(0, str(SHIM))
from benchmark_watch import WAITS, StepCounter, StepWatch, on_device, union

sys.path.remove(str(SHIM))


def test_spans_are_covered_once() -> None:
    assert union([]) == 0
    assert union([(5, 6), (0, 2), (1, 3), (1.5, 2.5)]) == 4


def test_events_of_the_host_are_not_those_of_a_device() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(3).sum()
    events = list(profiled.events())
    assert events and on_device(events) == []
    device = SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA, is_user_annotation=False)
    named = SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA, is_user_annotation=True)
    assert on_device([*events, device, named]) == [device]


def test_a_step_ends_with_the_first_update_after_a_backward() -> None:
    seen: list[int] = []
    hooks: list[Any] = []
    autograd = SimpleNamespace(backward=lambda: "done")
    optimizer = SimpleNamespace(register_optimizer_step_post_hook=hooks.append)
    StepCounter(seen.append).watch(autograd, optimizer)
    (update,) = hooks
    update(None, (), {})  # before any backward
    for _ in range(2):
        assert autograd.backward() == "done"
        autograd.backward()  # a second micro-batch
        update(None, (), {})
        update(None, (), {})  # a second group of parameters
    assert seen == [1, 2]


class WatchedCard:
    """What is called of ``torch.cuda``, as if there were a card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: str = "") -> None:
        self.modes: list[str] = []
        self._error = error
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)

    def set_mode(self, mode: str) -> None:
        if self._error:
            raise RuntimeError(self._error)
        self.modes.append(mode)


def watched(folder: Path, first: int, count: int, step: Callable[[int], None]) -> dict[str, Any]:
    """What a watch finds of a few steps."""
    watch = StepWatch(folder / "watched.json", first=first, count=count)
    for number in range(1, 8):
        watch.after(number)
        torch.ones(3).sum()
        step(number)
    found: dict[str, Any] = json.loads((folder / "watched.json").read_text())
    return found


def test_waits_are_counted_while_torch_warns_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(number: int) -> None:
        for _ in range(3):
            if 3 <= number < 5:
                warnings.warn(f"{WAITS} (Triggered internally at x.cpp:1)", stacklevel=1)
        if number == 4:
            warnings.warn("another", stacklevel=1)

    card = WatchedCard(monkeypatch)
    shown: list[str] = []
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
        found = watched(tmp_path, 3, 2, step)
    assert card.modes == ["warn", "default"]
    assert shown == ["another"]
    assert found["host_waits"] == 3
    assert 0 < found["busy"] <= 1 and found["operations"] >= 2


def test_without_a_card_there_are_no_waits_to_count(tmp_path: Path) -> None:
    assert watched(tmp_path, 1, 1, lambda number: None)["host_waits"] is None


def test_a_run_is_not_ended_where_it_cannot_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WatchedCard(monkeypatch, "no such mode")
    with warnings.catch_warnings():
        show = warnings.showwarning
        found = watched(tmp_path, 1, 1, lambda number: None)
        assert warnings.showwarning is show
    assert found["problem"] == "RuntimeError: no such mode"
    assert "busy" not in found
