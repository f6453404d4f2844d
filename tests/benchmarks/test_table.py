"""Tables: pairing by round, Markdown, JSON, failures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.measure import RunOutcome
from benchmarks.table import as_json, markdown, remarks, summarise

NAMES = ["anygauge", "deepspeed", "trl-packed"]


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
    ours, theirs = summarise(outcomes, NAMES)
    assert theirs.ratios["anygauge"].median == pytest.approx(2.5)
    assert theirs.ratios["anygauge"].rounds == 2
    assert theirs.tokens_per_s == 50.0
    assert ours.ratios == {}
    assert "process 1 ended" in ours.problem


def test_a_contender_that_only_failed_has_no_figures() -> None:
    rows = summarise([ran("anygauge", 1, 9.0), failed("deepspeed", 1)], NAMES)
    assert rows[1].tokens_per_s is None
    assert any("process 1 ended" in text for text in remarks(rows))
    assert "| DeepSpeed, by hand | - | - | - | - | - | - | 0 |" in markdown("t", rows)


def test_markdown_has_a_cell_for_every_heading() -> None:
    rows = summarise([ran("anygauge", 1, 2000.0), ran("deepspeed", 1, 1000.0)], NAMES)
    lines = [line for line in markdown("A title", rows).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| DeepSpeed, by hand | 1,000 | 2.000 | 25.0% | 2 | 2.0 | 2.0000 | 1,234 | 1 |" in lines


def test_json_has_every_run() -> None:
    outcomes = [ran("anygauge", 1, 2.0), ran("deepspeed", 1, 1.0)]
    record = json.loads(as_json({"python": "3"}, {"full": outcomes}))
    assert [run["name"] for run in record["workloads"]["full"]["runs"]] == ["anygauge", "deepspeed"]
    assert record["workloads"]["full"]["summary"][1]["ratios"]["anygauge"]["median"] == 2.0
    assert record["workloads"]["full"]["runs"][0]["final_loss"] == 2.0
