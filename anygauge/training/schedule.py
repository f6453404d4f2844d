"""Learning rate as a function of the step."""

from __future__ import annotations

import math

from anygauge.config.sections import ScheduleSection


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Rate of one optimizer step.

    Linear warmup reaches the peak at the first step after it, then: ``constant`` stays, ``linear``
    and ``cosine`` fall to ``final_ratio`` of the peak, reached one step after the last.

    Args:
        step: from 0.
        steps: in the whole run.
    """
    warmup = warmup_steps(steps, schedule)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.name == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule.name == "linear":
        share = 1.0 - progress
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


def depends_on_length(schedule: ScheduleSection) -> bool:
    """Whether a step's rate is another in a longer run."""
    warms_up = not schedule.warmup_steps and schedule.warmup_ratio > 0
    return schedule.name != "constant" or warms_up
