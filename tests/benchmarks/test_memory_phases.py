"""Peaks by phase: what a run must have recorded, and two contenders for real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.contender_plan import BenchmarkError
from benchmarks.measure import RunOutcome
from benchmarks.memory_phases import PHASES, check
from tests.benchmarks.commands import run


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
