"""Peaks by phase: what the shim sees of a run, and two contenders for real."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.measure import RunOutcome
from benchmarks.memory_phases import PHASES, check
from benchmarks.plan import BenchmarkError
from benchmarks.processes import SHIM
from tests.benchmarks.commands import run

sys.path.insert(0, str(SHIM))
from benchmark_phases import Phases, peak, reset

sys.path.remove(str(SHIM))


class Memory:
    """Of a process, as the kernel counts it."""

    def __init__(self) -> None:
        self.now = self.most = 10

    def hold(self, size: int) -> None:
        self.now = size
        self.most = max(self.most, size)

    def reset(self) -> None:
        self.most = self.now


def test_a_peak_belongs_to_its_phase() -> None:
    memory = Memory()
    phases = Phases(lambda: memory.most, memory.reset)

    class Loop:
        def run(self) -> str:
            memory.hold(50)
            memory.hold(30)
            self.evaluate()
            memory.hold(35)
            return "done"

        def evaluate(self) -> None:
            memory.hold(40)
            memory.hold(30)

    def save() -> None:
        memory.hold(45)

    module = SimpleNamespace(Loop=Loop)
    saver = SimpleNamespace(save=save)
    hooks = phases.hooks()
    hooks["anygauge.training.loop"](module)
    hooks["anygauge.training.save"](saver)
    memory.hold(20)
    assert Loop().run() == "done"
    saver.save()
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


def test_a_run_without_a_phase_or_an_adapter_is_refused(tmp_path: Path) -> None:
    whole = RunOutcome(name="trl", round=1, status="ok", phases=[dict.fromkeys(PHASES, 1)] * 2)
    with pytest.raises(BenchmarkError, match="saved no adapter"):
        check(whole, tmp_path, ranks=2)
    for phases in ([dict.fromkeys(PHASES, 1)], [dict.fromkeys(PHASES[:3], 1)] * 2):
        with pytest.raises(BenchmarkError, match="left out one of load"):
            check(dataclasses.replace(whole, phases=phases), tmp_path, ranks=2)


@pytest.mark.slow
def test_contenders_evaluate_and_save(tmp_path: Path) -> None:
    done = run(
        *("benchmarks.memory_phases", "--classes", "5000"),
        *("--rounds", "1", "--contenders", "anygauge-fsdp,trainer", "--layers", "1"),
        *("--hidden", "32", "--length", "32", "--output", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [each["name"] for each in record["runs"]] == ["anygauge-fsdp", "trainer"]
    for each in record["runs"]:
        assert len(each["phases"]) == 2
        assert min(sum(rank[phase] for rank in each["phases"]) for phase in PHASES) > 2**27
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| 5,000 classes | anygauge, fsdp |" in text
    assert "|  | HF Trainer + DeepSpeed |" in text
