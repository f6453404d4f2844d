"""Learning rate as a function of the step."""

from __future__ import annotations

import math

from anygauge.config.sections import ScheduleSection

DECAY_RATIO = 0.1
"""Of all steps, which the decay of ``warmup_stable_decay`` takes where the run file does not say.
Source: MiniCPM (arXiv 2404.06395), which introduced it."""


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Rate of one optimizer step.

    Linear warmup reaches the peak at the first step after it, then: ``constant`` stays, ``linear``
    and ``cosine`` fall to ``final_ratio`` of the peak, reached one step after the last.
    ``warmup_stable_decay`` stays until its decay, which falls as far, in the shape of its type.

    Args:
        step: from 0.
        steps: in the whole run.
    """
    warmup = warmup_steps(steps, schedule)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.name == "constant":
        return peak
    shape: str = schedule.name
    begin = warmup
    if schedule.name == "warmup_stable_decay":
        shape = schedule.decay_type or "cosine"
        begin = max(warmup, steps - _decay_steps(steps, schedule))
        if step < begin:
            return peak
    progress = (step - begin) / max(1, steps - begin)
    if shape == "linear":
        share = 1.0 - progress
    elif shape == "1-sqrt":
        share = 1.0 - math.sqrt(progress)
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * share)


def peak_advice(steps: int, peak: float, schedule: ScheduleSection) -> str | None:
    """Return advice where the run ends within its warmup; None where it does not."""
    if steps > warmup_steps(steps, schedule):
        return None
    field = "warmup_steps" if schedule.warmup_steps else "warmup_ratio"
    highest = learning_rate(steps - 1, steps, peak, schedule)
    return (
        f"train.schedule.{field} {getattr(schedule, field):g}: the learning rate rises during all "
        f"{steps} steps of this run, to {highest:.1e}, and never reaches train.optimizer.lr "
        f"{peak:.1e}. Set warmup_steps to at most {steps - 1} instead, or train longer"
    )


def warmup_steps(steps: int, schedule: ScheduleSection) -> int:
    """Steps before the first at the peak, in a run of `steps` steps."""
    return schedule.warmup_steps or math.ceil(schedule.warmup_ratio * steps)


def _decay_steps(steps: int, schedule: ScheduleSection) -> int:
    """Steps of the decay at the end, in a run of `steps` steps."""
    return schedule.num_decay_steps or math.ceil((schedule.decay_ratio or DECAY_RATIO) * steps)


def rates_differ(done: int, before: int, now: int, schedule: ScheduleSection) -> bool:
    """Whether one of the first `done` steps has other rates in runs of `before` and `now` steps."""
    runs = [[learning_rate(at, n, 1.0, schedule) for at in range(done)] for n in (before, now)]
    return runs[0] != runs[1]
