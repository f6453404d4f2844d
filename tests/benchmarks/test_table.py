"""Tables: pairing by round, Markdown, JSON, failures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.entrants import ENTRANTS
from benchmarks.measure import RunOutcome
from benchmarks.ratios import Ratio
from benchmarks.table import as_json, markdown, summarise

ENTRANTS_HERE = [ENTRANTS[name] for name in ("anygauge", "deepspeed", "trl-packed")]


def ran(name: str, round_: int, speed: float, **changes: Any) -> RunOutcome:
    fields: dict[str, Any] = {
        "peak_memory": 2**21,
        "sent": {"all_gather": 2.0**20, "all_reduce": 2.0**20},
        "losses": [9.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        "tokens": 1234,
        "padding": 0.25,
    }
    return RunOutcome(
        name=name, round=round_, status="ok", tokens_per_s=speed, **{**fields, **changes}
    )


def failed(name: str, round_: int) -> RunOutcome:
    return RunOutcome(
        name=name, round=round_, status="failed", problem="process 1 ended", log=["x"]
    )


def test_ratios_pair_only_rounds_in_which_both_ran() -> None:
    outcomes = [
        ran("anygauge", 1, 100.0),
        ran("deepspeed", 1, 50.0),
        failed("anygauge", 2),
        ran("deepspeed", 2, 1.0),
        ran("anygauge", 3, 300.0),
        ran("deepspeed", 3, 100.0),
    ]
    ours, theirs = summarise(outcomes, ENTRANTS_HERE)
    ratio = theirs.figures["anygauge / this"]
    assert isinstance(ratio, Ratio)
    assert (ratio.median, ratio.rounds) == (pytest.approx(2.5), 2)
    assert theirs.figures["tokens/s"] == 50.0
    assert ours.figures["anygauge / this"] is None
    assert "process 1 ended" in ours.note


def test_a_contender_that_only_failed_has_no_figures() -> None:
    rows = summarise([ran("anygauge", 1, 9.0), failed("deepspeed", 1)], ENTRANTS_HERE)
    assert rows[1].figures["tokens/s"] is None
    line = "| DeepSpeed, by hand | - | - | - | - | - | - | - | 0 | failed: process 1 ended |"
    assert line in markdown("t", rows)


def test_markdown_has_a_cell_for_every_heading() -> None:
    rows = summarise([ran("anygauge", 1, 2000.0), ran("deepspeed", 1, 1000.0)], ENTRANTS_HERE)
    lines = [line for line in markdown("A title", rows).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| DeepSpeed, by hand | 1,000 | 2.000 | 25.0% | 2 | 2.0 | 2.0000 | 1,234 | 1 |" in lines


def test_json_has_every_run() -> None:
    outcomes = [ran("anygauge", 1, 2.0), ran("deepspeed", 1, 1.0)]
    record = json.loads(as_json({"python": "3"}, {"full": outcomes}, ENTRANTS_HERE))
    assert [run["name"] for run in record["workloads"]["full"]["runs"]] == ["anygauge", "deepspeed"]
    summary = record["workloads"]["full"]["summary"]
    assert summary[1]["figures"]["anygauge / this"]["median"] == 2.0
    assert record["workloads"]["full"]["runs"][0]["final_loss"] == 2.0
