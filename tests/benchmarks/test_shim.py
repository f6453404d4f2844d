"""What is counted of collectives, watched of the last steps, and seen of memory by phase; and that
nothing happens outside ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contender_processes import SHIM

sys.path.insert(0, str(SHIM))
from benchmark_watch import WAITS, Phases, StepWatch, count_steps, on_device, peak, reset, union

sys.path.remove(str(SHIM))


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_shim", SHIM / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_are_those_of_a_ring(shim: ModuleType) -> None:
    def call(self: Any, *args: Any, **kwargs: Any) -> str:
        return "work"

    names = ("allreduce", "all_gather_single", "reduce_scatter_single", "broadcast")
    group = type("Group", (), {"size": lambda self: 4, **dict.fromkeys(names, call)})
    calls: list[Any] = []
    shim.count_calls(group, calls)
    ranks: Any = group()
    whole, part = torch.empty(400), torch.empty(100)
    assert ranks.allreduce([whole]) == "work"
    ranks.all_gather_single(whole, part)
    ranks.reduce_scatter_single(output=part, input=whole)
    ranks.broadcast([whole])
    assert [(operation, sent) for _, operation, sent in calls] == [
        ("all_reduce", 2400.0),
        ("all_gather", 1200.0),
        ("reduce_scatter", 1200.0),
        ("broadcast", 1200.0),
    ]


def start(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, "PYTHONPATH": str(SHIM), **variables},
    )


def test_a_rank_leaves_its_peak_memory(tmp_path: Path) -> None:
    tracker = "from multiprocessing import resource_tracker; resource_tracker.ensure_running()"
    code = f"b = bytearray(2**25); {tracker}"
    done = start(code, RANK="1", ANYGAUGE_BENCHMARK_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "traffic-rank1.json").read_text())
    assert record["calls"] == []
    if record["peak_memory"] is None:
        pytest.skip("this kernel does not tell a process's peak memory")
    assert record["peak_memory"] > 2**25


def test_a_process_that_is_no_rank_is_left_alone(tmp_path: Path) -> None:
    done = start("import sys; print(len(sys.meta_path))", ANYGAUGE_BENCHMARK_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


NEXT = """
import importlib.util, sys
print("next")
spec = importlib.util.spec_from_file_location("first", {shim!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def test_what_it_hides_runs_once_though_it_runs_the_first_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEXT.format(shim=str(SHIM / "sitecustomize.py")))
    done = start("", PYTHONPATH=f"{SHIM}{os.pathsep}{tmp_path}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "next\n", "")


def test_a_module_is_seen_after_its_own_code_has_run(shim: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("VALUE = 3\n")
    seen: list[int] = []
    finder = shim.AfterImport({"late_module": lambda module: seen.append(module.VALUE)})
    spec = finder.find_spec("late_module", [str(tmp_path)])
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert seen == [3]
    assert finder.find_spec("late_module", [str(tmp_path)]) is None


# -- the last steps -----------------------------------------------------------------------------


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
    count_steps(autograd, optimizer, seen.append)
    (update,) = hooks
    update(None, (), {})  # before any backward
    for _ in range(2):
        assert autograd.backward() == "done"
        autograd.backward()  # a second micro-batch
        update(None, (), {})
        update(None, (), {})  # a second group of parameters
    assert seen == [1, 2]


def with_card(monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], object]) -> None:
    """What is called of ``torch.cuda``, as if there were a card."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)


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

    modes: list[str] = []
    with_card(monkeypatch, modes.append)
    shown: list[str] = []
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
        found = watched(tmp_path, 3, 2, step)
    assert modes == ["warn", "default"]
    assert shown == ["another"]
    assert found["host_waits"] == 3
    assert 0 < found["busy"] <= 1 and found["operations"] >= 2


def test_without_a_card_there_are_no_waits_to_count(tmp_path: Path) -> None:
    assert watched(tmp_path, 1, 1, lambda number: None)["host_waits"] is None


def test_a_run_is_not_ended_where_it_cannot_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mode: str) -> None:
        raise RuntimeError("no such mode")

    with_card(monkeypatch, refuse)
    with warnings.catch_warnings():
        show = warnings.showwarning
        found = watched(tmp_path, 1, 1, lambda number: None)
        assert warnings.showwarning is show
    assert found["problem"] == "RuntimeError: no such mode"
    assert "busy" not in found


# -- memory by phase ----------------------------------------------------------------------------


def test_a_peak_belongs_to_its_phase() -> None:
    memory = SimpleNamespace(now=10, most=10)

    def hold(*sizes: int) -> None:
        for memory.now in sizes:
            memory.most = max(memory.most, memory.now)

    class Loop:
        def run(self) -> str:
            hold(50, 30)
            self.evaluate()
            hold(35)
            return "done"

        def evaluate(self) -> None:
            hold(40, 30)

    phases = Phases(lambda: memory.most, lambda: setattr(memory, "most", memory.now))
    module, saver = SimpleNamespace(Loop=Loop), SimpleNamespace(save_result=lambda: hold(45))
    hooks = phases.hooks()
    hooks["anygauge.training.loop"](module)
    hooks["anygauge.training.save"](saver)
    hold(20)
    assert Loop().run() == "done"
    saver.save_result()
    assert phases.taken() == {"load": 20, "training": 50, "evaluation": 40, "save": 45}


def test_the_kernel_begins_a_new_peak() -> None:
    held = bytearray(b"x" * 2**27)
    assert peak() > 2**27
    before = peak()
    del held
    try:
        reset()
    except OSError as error:
        pytest.skip(f"this kernel begins no new peak: {error}")
    assert peak() < before - 2**26
