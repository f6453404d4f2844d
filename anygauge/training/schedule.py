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
    warmup = schedule.warmup_steps or math.ceil(schedule.warmup_ratio * steps)
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


def depends_on_length(schedule: ScheduleSection) -> bool:
    """Whether a step's rate is another in a longer run."""
    warms_up = not schedule.warmup_steps and schedule.warmup_ratio > 0
    return schedule.name != "constant" or warms_up
