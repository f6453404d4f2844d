"""The speed of a run: the first steps are left out of it, and have figures of their own."""

from __future__ import annotations

import dataclasses
import json

import pytest

from anygauge.training.history import History

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
