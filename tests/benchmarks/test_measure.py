"""Reading what runs wrote: speed, traffic, memory, losses, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contender_plan import ContenderPlan
from benchmarks.entrants import ENTRANTS
from benchmarks.measure import MeasureError, RunOutcome, outcome

STEPS = 4


def plan(folder: Path, **changes: Any) -> ContenderPlan:
    fields: dict[str, Any] = {
        "model": "model",
        "rows": "rows.jsonl",
        "has_prompts": True,
        "output": str(folder),
        "steps": STEPS,
        "ranks": 2,
        "micro_batch": 1,
        "accumulation": 1,
        "max_length": 8,
    }
    return ContenderPlan(**{**fields, **changes})


def write_lines(path: Path, records: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_rank(folder: Path, rank: int, *, seconds: float = 2.0, tokens: int = 10) -> None:
    # Rank 1 has three times the loss tokens of rank 0, and twice the loss on each.
    loss_tokens = (2, 6)[rank]
    records = [
        {
            **{"time": 100 + seconds * (step + 1), "tokens": tokens, "slots": 2 * tokens},
            **{"loss_sum": loss_tokens * (rank + 1.0), "loss_tokens": loss_tokens},
        }
        for step in range(STEPS)
    ]
    write_lines(folder / f"steps-rank{rank}.jsonl", records)


def write_traffic(folder: Path, rank: int, calls: Sequence[tuple[float, str, float]]) -> None:
    record = {"rank": rank, "peak_memory": 1000 * (rank + 1), "calls": calls}
    (folder / f"traffic-rank{rank}.json").write_text(json.dumps(record))


def read(folder: Path, name: str = "deepspeed", **changes: Any) -> RunOutcome:
    return outcome(
        ENTRANTS[name],
        plan(folder, **changes),
        round_=1,
        expected=2 * STEPS * 10,
        began=90.0,
        wall_s=30.0,
    )


def two_ranks(folder: Path, **changes: Any) -> None:
    for rank in range(2):
        write_rank(folder, rank, **changes)
        write_traffic(folder, rank, [(103.0, "all_gather", 3.0)])


def test_speed_is_that_after_warm_up_over_all_ranks(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    result = read(tmp_path)
    assert result.tokens_per_s == pytest.approx(3 * 20 / (3 * 2.0))
    assert result.step_seconds == pytest.approx([2.0, 2.0, 2.0])
    assert result.first_step_s == pytest.approx(12.0)
    assert result.padding == pytest.approx(0.5)
    assert result.tokens == 80
    # Losses of ranks are weighed by loss tokens.
    assert result.losses == pytest.approx([(2 * 1.0 + 6 * 2.0) / 8] * STEPS)
    assert result.final_loss == pytest.approx(1.75)


def test_independent_ranks_have_speeds_of_their_own(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    write_rank(tmp_path, 1, seconds=4.0)
    assert read(tmp_path, "unsharded").tokens_per_s == pytest.approx(10 / 2 + 10 / 4)


def test_only_traffic_of_measured_steps_counts(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    # The first step ended at 102, the last at 108.
    calls = [(101.0, "all_gather", 7e9), (103.0, "all_gather", 30.0), (109.0, "broadcast", 7e9)]
    write_traffic(tmp_path, 0, calls)
    write_traffic(tmp_path, 1, [(108.0, "reduce_scatter", 60.0)])
    result = read(tmp_path)
    assert result.sent == pytest.approx({"all_gather": 10.0, "reduce_scatter": 20.0})
    assert result.peak_memory == 3000


def fewer_tokens(folder: Path) -> None:
    two_ranks(folder, tokens=9)


def silent(folder: Path) -> None:
    for rank in range(2):
        write_traffic(folder, rank, [(101.0, "broadcast", 8.0)])


@pytest.mark.parametrize(
    ("damage", "changes", "reported", "suits"),
    [
        (
            lambda folder: two_ranks(folder, tokens=9),
            {},
            "read 72 tokens in all, but its rows have 80",
            "trl-packed",
        ),
        (lambda folder: None, {"steps": 5}, "4 of 5 steps", None),
        (lambda folder: (folder / "traffic-rank1.json").unlink(), {}, r"traffic-rank1\.json", None),
        (silent, {}, "each rank trained by itself", "unsharded"),
    ],
)
def test_runs_that_cannot_be_reported(
    damage: Callable[[Path], None],
    changes: dict[str, Any],
    reported: str,
    suits: str | None,
    tmp_path: Path,
) -> None:
    """Each is refused, but for the contender that it suits."""
    two_ranks(tmp_path)
    damage(tmp_path)
    with pytest.raises(MeasureError, match=reported):
        read(tmp_path, **changes)
    if suits is not None:
        assert read(tmp_path, suits, layout=ENTRANTS[suits].layout).status == "ok"


@pytest.mark.parametrize("timed", [True, False])
def test_anygauge_is_read_from_its_metrics(timed: bool, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"step": 0, "name": "eval", "eval_loss": 1.0}]
    for step in range(STEPS):
        record = {"step": step + 1, "loss": 3.0 - step, "tokens": 20, "padding": 0.2}
        records.append({**record, "seconds": 1.0, **({"time": 100.0 + 2 * step} if timed else {})})
    write_lines(tmp_path / "run" / "metrics.jsonl", records)
    for rank in range(2):
        write_traffic(tmp_path, rank, [(101.0, "all_gather", 3.0)])
    if not timed:
        with pytest.raises(MeasureError, match="carry no 'time'"):
            read(tmp_path, "anygauge")
        return
    result = read(tmp_path, "anygauge")
    assert result.tokens_per_s == pytest.approx(10.0)
    assert result.losses == [3.0, 2.0, 1.0, 0.0]
    assert result.padding == pytest.approx(0.2)
