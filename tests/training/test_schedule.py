from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.sections import ScheduleSection
from anygauge.training.schedule import learning_rate, peak_advice, rates_differ


def rates(steps: int, **fields: object) -> list[float]:
    schedule = ScheduleSection.model_validate(fields)
    return [learning_rate(step, steps, 1.0, schedule) for step in range(steps)]


def test_constant_after_warmup() -> None:
    assert rates(5, name="constant", warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_its_end_one_step_after_the_last() -> None:
    assert rates(4, name="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(2, name="linear", final_ratio=0.5) == [1.0, 0.75]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = rates(4, name="cosine", final_ratio=0.2)
    assert found[0] == 1.0
    assert found[2] == pytest.approx(0.6)
    assert found[1] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_a_ratio_is_rounded_up_to_whole_steps() -> None:
    assert rates(10, name="constant", warmup_ratio=0.11)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "1-sqrt"])
def test_after_its_warmup_wsd_is_that_of_transformers(decay_type: str) -> None:
    import torch
    from transformers import get_wsd_schedule

    found = rates(
        20,
        name="warmup_stable_decay",
        warmup_steps=4,
        num_decay_steps=6,
        decay_type=decay_type,
        final_ratio=0.1,
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_wsd_schedule(
        optimizer, 4, 6, num_training_steps=20, decay_type=decay_type, min_lr_ratio=0.1
    )
    expected = []
    for _ in range(20):
        expected += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    assert found[4:] == pytest.approx(expected[4:], rel=1e-12)
    assert found[4:15] == [1.0] * 11 and found[15] < 1
    assert rates(20, name="warmup_stable_decay")[17:] == [1.0, 1.0, pytest.approx(0.5)]
    assert rates(20, name="warmup_stable_decay", decay_ratio=0.5)[9:11] == [1.0, 1.0]


def test_whether_a_longer_run_had_other_rates_is_looked_up() -> None:
    def differ(done: int, **fields: object) -> bool:
        return rates_differ(done, 10, 20, ScheduleSection.model_validate(fields))

    assert not differ(10, name="constant", warmup_steps=3)
    assert differ(10, name="constant", warmup_ratio=0.3)
    assert differ(10, name="linear")
    assert not differ(9, name="warmup_stable_decay")
    assert differ(10, name="warmup_stable_decay", num_decay_steps=2)


@given(
    steps=st.integers(1, 60),
    name=st.sampled_from(["constant", "linear", "cosine", "warmup_stable_decay"]),
    warmup=st.integers(0, 80),
    final=st.floats(0, 1),
)
def test_rates_stay_between_zero_and_the_peak_and_never_rise_after_warmup(
    steps: int, name: str, warmup: int, final: float
) -> None:
    found = rates(steps, name=name, warmup_steps=warmup, final_ratio=final)
    assert all(0 < rate <= 1 for rate in found)
    assert all(b <= a + 1e-12 for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False))


@given(
    steps=st.integers(1, 30),
    warmup=st.one_of(
        st.builds(lambda n: {"warmup_steps": n}, st.integers(0, 40)),
        st.builds(lambda share: {"warmup_ratio": share}, st.floats(0, 1)),
    ),
)
def test_a_peak_that_is_never_reached_is_said_with_what_reaches_it(
    steps: int, warmup: dict[str, float]
) -> None:
    found = peak_advice(steps, 1.0, ScheduleSection.model_validate(warmup))
    assert (found is None) == (max(rates(steps, **warmup)) == 1.0)
    if found is not None:
        (most,) = re.findall(r"Set warmup_steps to at most (\d+)", found)
        assert max(rates(steps, warmup_steps=int(most))) == 1.0
