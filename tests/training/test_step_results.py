"""What steps come to: when it is read, what is refused of it, and the speed that it gives."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from anygauge.interface import Collectives, DataAccessError, DataError, NonFiniteLossError
from anygauge.training.loop import Loop
from anygauge.training.step_results import (
    History,
    MetricsLogger,
    PendingSteps,
    StepResult,
    check_finite,
)
from anygauge.util.events import EventWriter
from anygauge_cpu.placement import CpuPlacement
from tests.helpers.runs import Run, run_file, trained_here
from tests.helpers.tiny_tokenizer import FIXTURES
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

    def reading(self: Any, result: Any, **fields: Any) -> None:
        seen.append(f"read {result.index + 1}")
        step(self, result, **fields)

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


def test_the_first_steps_are_not_in_the_speed(tmp_path: Path) -> None:
    ended = run(tmp_path, checkpoint={"every": 7}, train={"throughput_warmup_steps": 3})
    record = json.loads((ended.folder / "checkpoints/step-00000007/checkpoint.json").read_text())
    assert (record["history"]["step"], record["history"]["timed_steps"]) == (7, 4)


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
    loop = mock.Mock(start=0)
    loop.logger.world_size = ranks
    loop.batches.normalizer.side_effect = error("x")
    with pytest.raises(error):
        Loop._normalizer(loop, 3)
    assert loop.checkpoints.save_before_error.called is loop.pending.read.called is saved


def test_the_first_loss_is_that_of_the_first_step_that_has_one() -> None:
    history = History()
    for index, loss in enumerate((None, 2.0, 1.0)):
        history.add(index, loss=loss, tokens=3, seconds=1.0, timed=False)
    assert (history.first_loss, history.last_loss) == (2.0, 1.0)


def test_a_step_without_loss_tokens_changes_nothing_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(EventWriter, "message", lambda _, text, *level: said.append(text))
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
    assert [text.partition(":")[0] for text in said if "anything to learn" in text] == [
        "step 2",
        "step 4",
    ]
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


# Numbers that are not finite

ALONE = Collectives("none")  # no group was joined: this rank is all there is


def check(sums: list[float], norm: float, *, skipped: bool = False) -> None:
    """Of step 7, with two micro-batches."""
    step = StepResult(
        index=6,
        origins=[("rows:1", "rows:2"), ("rows:3",)],
        padded_tokens=6,
        normalizer=2,
        lr=0.1,
        skipped=skipped,
        on_host={},
        copied=torch.empty(0),
        counted=None,
        began=None,
        ended=None,
    )
    check_finite(step, sum(sums), sums, norm, ALONE)


def test_finite_passes_and_so_does_an_update_that_loss_scaling_skipped() -> None:
    check([1.0, 2.0], 0.5)
    check([1.0, 2.0], math.inf, skipped=True)


@pytest.mark.parametrize(
    ("sums", "norm", "what", "rows"),
    [
        ([1.0, math.nan], 0.5, "the loss became nan", {3}),
        ([1.0, math.inf], 0.5, "the loss became inf", {3}),
        ([1.0, 2.0], math.nan, "the gradient's norm became nan", {1, 2, 3}),
    ],
)
def test_what_is_not_finite_names_the_rows_that_may_be_it(
    sums: list[float], norm: float, what: str, rows: set[int]
) -> None:
    with pytest.raises(NonFiniteLossError, match=f"{what} at step 7") as error:
        check(sums, norm)
    assert {row for row in (1, 2, 3) if f"rows:{row}" in str(error.value)} == rows


# The speed of a run: the first steps are left out of it, and have figures of their own

SECONDS = [30.0, 5.0, 2.0, 2.0, 4.0]
TOKENS = [100, 100, 100, 100, 200]


def run_of(steps: int, warmup: int) -> History:
    history = History()
    for index in range(steps):
        history.add(
            index,
            loss=3.0 - index,
            tokens=TOKENS[index],
            seconds=SECONDS[index],
            timed=index >= warmup,
        )
    return history


def test_the_first_steps_are_left_out_and_have_their_own_figures() -> None:
    speed = run_of(5, warmup=2).speed()
    assert speed == {
        "tokens_per_s": pytest.approx(400 / 8),
        "timed_steps": 3,
        "warmup_s": pytest.approx(35.0),
        # 200 tokens take 4 s at that rate.
        "warmup_extra_s": pytest.approx(31.0),
    }
    assert run_of(5, warmup=2).step_seconds() == pytest.approx(8 / 3)


def test_a_warm_up_that_took_no_longer_took_nothing_extra() -> None:
    history = run_of(2, warmup=0)
    history.add(2, loss=1.0, tokens=100, seconds=90.0, timed=True)
    slow = dataclasses.replace(history, timed_tokens=100, timed_seconds=90.0)
    assert slow.speed()["warmup_extra_s"] == 0.0


def test_without_a_warm_up_every_step_counts() -> None:
    speed = run_of(5, warmup=0).speed()
    assert speed["tokens_per_s"] == pytest.approx(600 / 43)
    assert (speed["timed_steps"], speed["warmup_s"], speed["warmup_extra_s"]) == (5, 0, 0)


@pytest.mark.parametrize("warmup", [2, 3])
def test_a_run_that_ends_in_its_warm_up_counts_all_steps_and_says_how_many(warmup: int) -> None:
    history = run_of(2, warmup)
    assert history.speed() == {"tokens_per_s": pytest.approx(200 / 35), "timed_steps": 2}
    assert history.step_seconds() == pytest.approx(35 / 2)


def test_a_run_without_steps_has_no_speed() -> None:
    assert History().speed() == {} and History().step_seconds() is None


def test_a_checkpoint_keeps_what_was_timed() -> None:
    history = run_of(5, warmup=2)
    record = json.loads(json.dumps(dataclasses.asdict(history)))
    assert History.of_record(record) == history
