"""Order of the rounds, and what paired ratios say: medians and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TypeVar

Item = TypeVar("Item")

CONFIDENCE = 0.95
_PANELS = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paired ratios of several rounds.

    Attributes:
        median: of the ratios.
        low, high: interval of the geometric mean; None with fewer than two rounds.
    """

    median: float
    low: float | None
    high: float | None
    rounds: int


def rotated(items: Sequence[Item], round_: int) -> list[Item]:
    """Each round begins one further on, so that no contender is always first or always last."""
    shift = round_ % len(items) if items else 0
    return [*items[shift:], *items[:shift]]


def paired(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """over / under, round by round.

    The interval is Student's on the logarithms: ratios are multiplicative, and resampling a
    handful of rounds would give intervals that are too narrow.
    """
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if len(ratios) < 2:
        return Ratio(median(ratios), None, None, len(ratios))
    logs = [math.log(ratio) for ratio in ratios]
    reach = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    return Ratio(median(ratios), math.exp(middle - reach), math.exp(middle + reach), len(ratios))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Half-width, in standard errors, of Student's two-sided interval.

    With x = sqrt(degrees) * tan(angle) the density is a power of the cosine, on a finite range:
    integrated by Simpson's rule, inverted by bisection.
    """

    def area(angle: float) -> float:
        width = angle / _PANELS
        values = [math.cos(width * i) ** (degrees - 1) for i in range(_PANELS + 1)]
        return (
            width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
        )

    whole = area(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if area(middle) < confidence * whole:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)
