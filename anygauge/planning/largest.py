"""The largest batch, or the longest rows, with which a run fits: found by few rehearsals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError
from anygauge.planning.changes import Change
from anygauge.planning.trials import Target, Trial, Try, changed

MOST_TRIALS = 12
"""Rehearsals at most; the answer is then what is known to fit by then."""
MOST = 2**20
PLACES = 64
"""Lengths of rows that are tried are multiples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest number that fits.

    Attributes:
        change: what to write; None: not even the smallest fits.
        trial: of that number.
        beyond: the smallest that is known not to fit, or not to be taken; None: none was met.
        refused: why `beyond` is not taken; "" where it does not fit.
    """

    change: Change | None
    trial: Trial | None
    beyond: Change | None
    refused: str = ""


def largest_batch(run: RunFile, target: Target, tried: Try, parts: int) -> Largest:
    """The most sequences per forward; a step has as many forwards as before.

    Args:
        parts: into how many parts the ranks divide the rows of a step.
    """
    size = run.train.sequences_at_once(parts)
    forwards = run.train.global_batch_size // size

    def lines(size: int) -> Change:
        batch = {"train.micro_batch_size": size, "train.global_batch_size": size * forwards}
        return Change(lines=batch, costs=f"a step has {size * forwards:,} sequences")

    return _Search(run, target, tried, lines).found(size)


def largest_sequence(run: RunFile, target: Target, tried: Try) -> Largest:
    """The most tokens in a row."""

    def lines(size: int) -> Change:
        return Change(lines={"data.max_length": size * PLACES}, costs="rows are longer or shorter")

    return _Search(run, target, tried, lines).found(max(1, run.data.max_length // PLACES))


class _Search:
    """Follows the line through two points to where nothing is left, and looks on both sides."""

    def __init__(
        self, run: RunFile, target: Target, tried: Try, lines: Callable[[int], Change]
    ) -> None:
        self._run, self._target, self._try, self._lines = run, target, tried, lines
        self._left: dict[int, int] = {}
        self._low, self._high = 0, MOST
        self._best: Trial | None = None
        self._refused = ""

    def found(self, first: int) -> Largest:
        number = first
        while self._high - self._low > 1 and len(self._left) < MOST_TRIALS:
            before = self._high - self._low
            self._look(number)
            number = self._guess(number)
            if self._high < MOST and self._high - self._low > before / 2:
                number = (self._low + self._high) // 2  # the line is none
        return Largest(
            change=self._lines(self._low) if self._low else None,
            trial=self._best,
            beyond=None if self._high == MOST else self._lines(self._high),
            refused=self._refused,
        )

    def _look(self, number: int) -> None:
        try:
            trial = self._try(changed(self._run, self._lines(number).lines), self._target)
        except AnygaugeError as error:
            self._high, self._refused = number, str(error)
            return
        assert trial.fit is not None, "there is a card to hold it against"
        self._left[number] = trial.fit.margin
        if trial.fit.fits:
            self._low, self._best = number, trial
        else:
            self._high, self._refused = number, ""

    def _guess(self, number: int) -> int:
        near = [one for one in (self._low, self._high) if one in self._left]
        if len(near) < 2:
            near = sorted(self._left, key=lambda one: abs(self._left[one]))[:2]
        if len(near) < 2 or self._left[near[0]] == self._left[near[1]]:
            guess = 2 * number if self._low else number // 2
        else:
            (a, b), left = near, self._left
            guess = math.floor(a + left[a] * (b - a) / (left[a] - left[b]))
        if self._refused and len(near) < 2:
            guess = (self._low + self._high) // 2
        return max(self._low + 1, min(guess, self._high - 1))
