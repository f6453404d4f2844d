"""Batches are laid out ahead, and numbers are read late: in which order, and how both end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anygauge.interface import DataAccessError, DataError
from anygauge.training.loop import Loop
from anygauge.training.meter import MetricsLogger
from anygauge.training.pending import PendingSteps
from anygauge_cpu.placement import CpuPlacement
from tests.helpers.runs import Run, run_file, trained_here
from tests.helpers.tokenizer import FIXTURES
from tests.training.test_non_finite import HostEvent
from tests.training.test_warm_up import numbers

SINGLE = {"name": "single"}


@pytest.fixture
def works_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which the loop reads a step when it has begun the next one."""
    monkeypatch.setattr(CpuPlacement, "works_ahead", True)
    monkeypatch.setattr(CpuPlacement, "event", lambda self: HostEvent())


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop does: steps that are given to the device, and steps that are read."""
    seen: list[str] = []
    add, step, evaluation = PendingSteps.add, MetricsLogger.step, MetricsLogger.evaluation

    def adding(self: Any, index: int, *args: Any) -> None:
        seen.append(f"given {index + 1}")
        add(self, index, *args)

    def reading(self: Any, index: int, **fields: Any) -> None:
        seen.append(f"read {index + 1}")
        step(self, index, **fields)

    def evaluating(self: Any, done: int, *args: Any) -> None:
        seen.append(f"evaluated {done}")
        evaluation(self, done, *args)

    monkeypatch.setattr(PendingSteps, "add", adding)
    monkeypatch.setattr(MetricsLogger, "step", reading)
    monkeypatch.setattr(MetricsLogger, "evaluation", evaluating)
    return seen


def run(folder: Path, name: str = "tiny", **changes: Any) -> Run:
    fields: dict[str, Any] = {"strategy": SINGLE, "data": {"eval_fraction": 0.2}, **changes}
    train = {"steps": 7, "eval_every": 4, **fields.pop("train", {})}
    return trained_here(run_file(folder, name=name, train=train, **fields))


def batch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("batches-ahead")]


def test_a_step_is_read_when_the_next_was_given(
    tmp_path: Path, works_ahead: None, order: list[str]
) -> None:
    late = run(tmp_path)
    assert order == [
        *("given 1", "given 2", "read 1", "given 3", "read 2", "given 4", "read 3", "read 4"),
        *("evaluated 4", "given 5", "given 6", "read 5", "given 7", "read 6", "read 7"),
        "evaluated 7",
    ]
    assert all(seconds > 0 for seconds in late.steps("seconds"))
    assert not batch_threads()


def test_the_numbers_are_those_that_are_read_at_once(
    tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = run(tmp_path, "once")
    assert order[:4] == ["given 1", "read 1", "given 2", "read 2"]
    monkeypatch.setattr(CpuPlacement, "works_ahead", True)
    monkeypatch.setattr(CpuPlacement, "event", lambda self: HostEvent())
    assert numbers(run(tmp_path, "late")) == numbers(at_once)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_checkpoint_has_all_steps_and_a_run_resumes_where_it_was(
    streaming: bool, tmp_path: Path, works_ahead: None
) -> None:
    held_out = {"eval": {"path": str(FIXTURES / "rows.jsonl"), "limit": 5}}
    data = {"streaming": True, **held_out} if streaming else {"eval_fraction": 0.2}
    whole = run(tmp_path, "whole", data=data, checkpoint={"every": 3, "keep_last": 9})
    record = json.loads((whole.folder / "checkpoints/step-00000003/checkpoint.json").read_text())
    assert record["history"]["step"] == 3
    first = whole.folder / "checkpoints/step-00000003"
    rest = run(tmp_path, "rest", data=data, checkpoint={"resume": str(first)})
    assert rest.steps("loss") == whole.steps("loss")[3:]
    assert rest.steps("tokens") == whole.steps("tokens")[3:]


def test_a_request_to_stop_ends_after_steps_that_were_read(
    tmp_path: Path, works_ahead: None, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = PendingSteps.add

    def asking(self: Any, index: int, *args: Any) -> None:
        add(self, index, *args)
        self.stop.asked = index >= 1

    monkeypatch.setattr(PendingSteps, "add", asking)
    stopped = run(tmp_path)
    assert order == ["given 1", "given 2", "read 1", "read 2"]
    assert [p.name for p in (stopped.folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert not batch_threads()


@pytest.fixture
def wrong_row(tmp_path: Path) -> Path:
    """Rows of which the sixtieth is none; the command looks at the first ones alone."""
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"text": "a few words"}\n' * 59 + "no json\n" + '{"text": "more"}\n' * 4)
    return path


def ended() -> Iterator[bool]:
    for _ in range(600):
        yield not batch_threads()
        time.sleep(0.05)


def test_an_error_of_the_thread_is_the_runs_and_names_the_row(
    tmp_path: Path, wrong_row: Path, order: list[str]
) -> None:
    data = {"train": {"path": str(wrong_row), "limit": 64}, "streaming": True}
    with pytest.raises(DataError, match=r"wrong\.jsonl:60"):
        run(tmp_path, data=data, train={"epochs": 1, "steps": None, "eval_every": None, "seed": 5})
    steps = len(order) // 2
    assert steps > 3, "the error comes with its step"
    assert [each.name for each in tmp_path.glob("out/*/checkpoints/*")] == [f"step-{steps:08}"]
    assert order == [f"{what} {n}" for n in range(1, steps + 1) for what in ("given", "read")]
    assert any(ended()), "the thread ends with the loop"


@pytest.mark.parametrize(
    ("error", "ranks", "saved"),
    [
        (DataError, 1, True),
        (DataError, 2, True),
        (DataAccessError, 1, True),
        (DataAccessError, 2, False),
    ],
)
def test_no_rank_waits_for_others_where_the_network_failed_it_alone(
    error: type[DataError], ranks: int, saved: bool
) -> None:
    loop, pending = mock.Mock(start=0), mock.Mock()
    loop.meter.world_size = ranks
    loop.batches.num_loss_tokens.side_effect = error("x")
    with pytest.raises(error):
        Loop._loss_tokens(loop, 3, pending)
    assert loop.checkpoints.save_before_error.called is pending.settle.called is saved


def test_a_step_without_loss_tokens_changes_nothing_and_counts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": "a", "completion": each}) for each in ("b c", "")]
    rows.write_text("".join(f"{line}\n" * 4 for line in lines))
    data = {"train": {"path": str(rows)}, "streaming": True, "shuffle": False}
    fields: dict[str, Any] = {"data": data, "train": {"steps": 5, "eval_every": None}}
    whole = run(tmp_path, "whole", **fields, checkpoint={"every": 2, "keep_last": 9})
    steps = [record for record in whole.records if "num_loss_tokens" in record]
    assert [record["num_loss_tokens"] > 0 for record in steps] == [True, False] * 2 + [True]
    assert ["loss" in record for record in steps] == [True, False] * 2 + [True]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    for folder in sorted((whole.folder / "checkpoints").iterdir())[:2]:
        resume = {"resume": str(folder)}
        rest = run(tmp_path, f"rest-{folder.name}", **fields, checkpoint=resume)
        assert rest.steps("loss") == whole.steps("loss")[-len(rest.steps("loss")) :]


def test_the_thread_ends_when_the_loop_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PendingSteps, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert any(ended())
