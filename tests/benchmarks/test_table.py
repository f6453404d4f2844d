"""Ratios by round, their interval, and the tables of contenders."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from benchmarks.entrants import ENTRANTS
from benchmarks.measure import MIB, Ratio, RunOutcome, markdown, paired, rotated, summarize, table
from benchmarks.memory_phases import PHASES
from benchmarks.memory_phases import table_rows as by_phase
from benchmarks.start_up import table_rows as by_start

CONTENDERS = [ENTRANTS[name] for name in ("anygauge", "deepspeed")]


def ran(name: str, round_: int, speed: float, **changes: Any) -> RunOutcome:
    fields: dict[str, Any] = {
        "status": "ok",
        "tokens_per_s": speed,
        "peak_memory": 2**21,
        "sent": {"all_gather": 2.0**20, "all_reduce": 2.0**20},
        "losses": [9.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        "tokens": 1234,
        "padding": 0.25,
    }
    return RunOutcome(name=name, round=round_, **{**fields, **changes})


def failed(name: str, round_: int) -> RunOutcome:
    return RunOutcome(name=name, round=round_, status="failed", problem="process 1 ended")


def test_every_contender_takes_every_place() -> None:
    orders = [rotated("abc", round_) for round_ in range(4)]
    assert orders == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 3) == []


def test_ratios_are_paired_and_their_interval_is_students_on_logarithms() -> None:
    # The machine was half as fast in the second round, for both.
    assert paired([200.0, 100.0], [100.0, 50.0]).low == pytest.approx(2.0)
    ratio = paired([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    reach = 4.30265 * math.log(2) / math.sqrt(3)
    assert ratio.median == 2.0
    assert ratio.low == pytest.approx(2 * math.exp(-reach), rel=1e-4)
    assert ratio.high == pytest.approx(2 * math.exp(reach), rel=1e-4)
    assert paired([3.0], [2.0]) == Ratio(1.5, None, None, 1)


def test_ratios_pair_only_rounds_in_which_both_ran() -> None:
    outcomes = [
        ran("anygauge", 1, 100.0),
        ran("deepspeed", 1, 50.0),
        failed("anygauge", 2),
        ran("deepspeed", 2, 1.0),
        ran("anygauge", 3, 300.0),
        ran("deepspeed", 3, 100.0),
    ]
    ours, theirs = summarize(outcomes, CONTENDERS)
    ratio = theirs.figures["anygauge / this"]
    assert isinstance(ratio, Ratio)
    assert (ratio.median, ratio.rounds) == (pytest.approx(2.5), 2)
    assert theirs.figures["tokens/s"] == 50.0
    assert ours.figures["anygauge / this"] is None
    assert "process 1 ended" in ours.note


def test_a_contender_has_the_figures_of_what_it_trained() -> None:
    rows = summarize([ran("anygauge", 1, 9.0), failed("deepspeed", 1)], CONTENDERS)
    line = "| DeepSpeed, by hand | - | - | - | - | - | - | - | 0 | failed: process 1 ended |"
    assert line in markdown("t", rows)
    afterwards = ran("anygauge", 1, 9.0, status="failed", problem="not verified")
    (ours,) = summarize([afterwards], CONTENDERS)
    assert (ours.figures["tokens/s"], ours.note) == (9.0, "failed: not verified")


def test_markdown_and_json_have_every_contender() -> None:
    rows = summarize([ran("anygauge", 1, 2000.0), ran("deepspeed", 1, 1000.0)], CONTENDERS)
    shown = markdown("A title", rows)
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| DeepSpeed, by hand | 1,000 | 2.000 | 25.0% | 2 | 2 | 2 | 1,234 | 1 |" in lines
    found = json.loads(json.dumps([dataclasses.asdict(row) for row in rows]))
    assert found[1]["figures"]["anygauge / this"]["median"] == 2.0
    assert ran("anygauge", 1, 2000.0).final_loss == 2.0


def test_phases_are_compared_within_a_round() -> None:
    def run(name: str, round_: int, size: int) -> RunOutcome:
        return ran(name, round_, 1.0, phases=[dict.fromkeys(PHASES, size * MIB // 2)] * 2)

    found = [run("anygauge", r, 100 * r) for r in (1, 2, 3)]
    found += [run("deepspeed", r, 200 * r + 100 * (r == 3)) for r in (1, 2, 3)]
    ours, theirs = table(by_phase(1000, found, CONTENDERS))[2:]
    assert ours == "| 1,000 classes | anygauge |" + " 200 (1.00) |" * 4
    assert theirs == "|  | DeepSpeed, by hand |" + " 400 (2.00) |" * 4


def test_starts_are_compared_within_a_round() -> None:
    found = [
        ran(name, round_, 1.0, first_step_s=seconds, cpu_seconds=cpu, modules=modules)
        for name, round_, seconds, cpu, modules in (
            ("anygauge", 1, 2.0, 1.0, 1000),
            ("deepspeed", 2, 4.0, 5.0, 2000),
            ("deepspeed", 1, 6.0, 5.0, 2000),
            ("anygauge", 2, 4.0, 3.0, 1000),
        )
    ]
    ours, theirs = table(by_start(found, CONTENDERS))[2:]
    assert ours == "| anygauge | 3 | 1.000 [1.000, 1.000] | 2 | 1,000 |"
    assert theirs.startswith("| DeepSpeed, by hand | 5 | 2.000 [")
    assert theirs.endswith("] | 5 | 2,000 |")
