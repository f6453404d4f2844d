"""What to change of a run: lines that make it fit, and the largest batch or rows that fit.

Lines to paste into the run file; each change is rehearsed before it is shown.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError
from anygauge.planning.memory import ADAPTER, GRADIENTS, KINDS, OPTIMIZER, WEIGHTS
from anygauge.planning.trials import Target, Trial, Try, changed
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.training.strategy import share_of

DEGREES = ("cp", "tp", "pp")
"""Fields of a strategy by which rows and layers are divided: another strategy keeps them."""
ENOUGH = 3
"""Changes that fit; no more are looked for."""
MOST_TRIALS = 16
"""Rehearsals at most: each takes seconds, of a large model more."""
USEFUL = 0.99
"""Of changes that are added up, one that leaves more than this missing is left out."""
SHORT = 128
"""Tokens of a row below which it is not made shorter."""
SMALL_R = 8
"""An adapter's rank below which it is not made smaller."""
MOST_NODES = 8
HELD = (WEIGHTS, ADAPTER, GRADIENTS, OPTIMIZER)
"""What does not depend on the batch."""

Lines = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Lines of a run file, and what they cost.

    Attributes:
        lines: dotted path -> value; ``strategy`` is the whole section.
        costs: in words.
        leaves: kinds of tensors that stay as they are; (): it may take from all.
    """

    lines: Lines
    costs: str
    leaves: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """The same for a command line, each to stand behind ``--set``."""
        found = []
        for path, value in self.lines.items():
            if path == "strategy":
                found.append(f"strategy={value['name']}")
                found += [f"strategy.{k}={_inline(v)}" for k, v in value.items() if k != "name"]
            else:
                found.append(f"{path}={_inline(value)}")
        return found

    @property
    def text(self) -> str:
        """The same as YAML, to be pasted into a run file."""
        tree: dict[str, Any] = {}
        for path, value in self.lines.items():
            *sections, name = path.split(".")
            at = tree
            for section in sections:
                at = at.setdefault(section, {})
            at[name] = dict(value) if isinstance(value, Mapping) else value
        return "\n".join(f"{key}: {_inline(value)}" for key, value in tree.items())

    def over(self, other: Change) -> Change:
        """Both changes."""
        return Change(
            lines={**other.lines, **self.lines},
            costs="; ".join(filter(None, (other.costs, self.costs))),
        )


def _all(changes: Sequence[Change]) -> Change:
    """All of them; a later one over an earlier one."""
    together = Change(lines={}, costs="")
    for change in changes:
        together = change.over(together)
    return together


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """A change, and the run with it, which fits."""

    change: Change
    trial: Trial


def candidates(run: RunFile, target: Target, registry: Registry) -> Iterator[Sequence[Change]]:
    """Changes that take memory away, those that cost least first.

    Each is a list from mild to strong. What a configuration or a backend refuses is among them.
    """
    ranks = run.launch.nodes * run.launch.devices
    parts = share_of(run, registry, 0, ranks).count
    train = run.train
    sharded, offloaded = _lighter(run, registry)
    for change in sharded if ranks > 1 else ():
        yield [change]
    rows = train.global_batch_size // parts
    fewer = [n for n in range(train.sequences_at_once(parts) - 1, 0, -1) if rows % n == 0]
    smaller = [
        _change({"train.micro_batch_size": n}, "more, smaller forwards in a step", HELD)
        for n in fewer
    ]
    if smaller:
        yield smaller
    if train.activations.every != 1 or train.activations.selective:
        costs = "layers are computed twice: a third more arithmetic"
        yield [_change({"train.gradient_checkpointing": True}, costs, HELD)]
    if train.optimizer.name == "adamw":
        costs = "the optimizer's state has 8 bits"
        yield [
            _change(
                {"train.optimizer.name": "adamw_8bit"},
                costs,
                tuple(k for k in KINDS if k != OPTIMIZER),
            )
        ]
    if not train.activation_offloading:
        costs = "activations travel to the host and back"
        yield [_change({"train.activation_offloading": True}, costs, HELD)]
    for change in offloaded:
        yield [change]
    if run.adapter is not None and run.model.quantise is None:
        yield [_change({"model.quantise": "nf4"}, "the base has 4 bits: some loss of quality")]
    if run.adapter is None:
        costs = "an adapter is trained in place of all weights"
        adapter = {"adapter": {"r": 16}}
        nf4 = {**adapter, "model.quantise": "nf4"}
        yield [_change(adapter, costs), _change(nf4, f"{costs}, of a base with 4 bits")]
    elif run.adapter.r > SMALL_R and run.adapter.start_from is None:
        yield [_change({"adapter.r": SMALL_R}, "a smaller adapter")]
    yield from _more_ranks(run, target)
    lengths: list[Change] = []
    while (length := run.data.max_length >> len(lengths) + 1) >= SHORT:
        lengths.append(_change({"data.max_length": length}, "longer rows are cut", HELD))
    if lengths:
        yield lengths


def _lighter(run: RunFile, registry: Registry) -> tuple[list[Change], list[Change]]:
    """What strategies propose, the first of each by itself; nothing that takes more than it."""
    section = values_of(run)["strategy"]
    kept = {name: section[name] for name in DEGREES if section.get(name, 1) > 1}
    proposed: dict[str, list[Change]] = {}
    for provided in registry.strategies:
        if not provided.spec.lighter:
            continue
        if kept.keys() - load_options(provided, "strategy").model_fields.keys():
            continue  # the run's own division would be lost
        proposed[provided.spec.name] = [
            _change({"strategy": {"name": provided.spec.name, **kept, **fields}}, costs)
            for fields, costs in provided.spec.lighter
        ]
    own = proposed.get(section["name"], [])
    level = next((n for n, one in enumerate(own) if changed(run, one.lines) == run), -1)
    others = [changes for changes in proposed.values() if changes is not own]
    first = [one[0] for one in ([own] if own and level < 0 else []) + (others if level < 1 else [])]
    return first, [*own[max(1, level + 1) :], *(one for more in others for one in more[1:])]


def _more_ranks(run: RunFile, target: Target) -> Iterator[Sequence[Change]]:
    """The machine's other cards, then further machines; rows of a global batch are enough."""
    nodes, devices = run.launch.nodes, run.launch.devices
    most = devices if target.machine is None else target.machine.cards
    batch = run.train.global_batch_size
    found = [
        _change({"launch.devices": n}, f"{n} cards")
        for n in range(devices + 1, most + 1)
        if not batch % (n * nodes)
    ]
    found += [
        _change({"launch.devices": most, "launch.nodes": n}, f"{n} machines")
        for n in range(nodes + 1, nodes * MOST_NODES + 1)
        if not batch % (n * most) and n % nodes == 0
    ]
    if found and target.card is not None and not target.card.shared_memory:
        yield found


def _change(lines: Lines, costs: str, leaves: tuple[str, ...] = ()) -> Change:
    return Change(lines=lines, costs=costs, leaves=leaves)


def nearest(run: RunFile, target: Target, tried: Try, registry: Registry) -> list[Fitting]:
    """Changes with which a run fits, those that cost least first; few of them.

    Where no single one is enough they are added up, until it fits; empty: not even so.
    """
    search = _Search(run, target, tried, registry)
    found = search.single()
    return found or search.together()


class _Search:
    def __init__(self, run: RunFile, target: Target, tried: Try, registry: Registry) -> None:
        self._run, self._target, self._try = run, target, tried
        self._candidates = tuple(candidates(run, target, registry))
        self._done: dict[str, Trial | None] = {}

    def single(self) -> list[Fitting]:
        """Changes that are enough by themselves."""
        found: list[Fitting] = []
        for ladder in self._candidates:
            if not self._may_do(ladder[-1]):
                continue
            fitting = self._mildest(ladder, _all([]))
            if fitting is not None:
                found.append(fitting)
            if len(found) == ENOUGH:
                break
        return found

    def _may_do(self, change: Change) -> bool:
        """Whether there is room for what a change leaves as it is: if not, nothing is rehearsed."""
        trial = self._trial(_all([]))
        if trial is None or trial.fit is None:
            return True
        least = (
            sum(peak.kinds.get(kind, 0) for kind in change.leaves)
            for peak in trial.memory.device.values()
        )
        return trial.fit.holds(max(least))

    def together(self) -> list[Fitting]:
        """The first changes in their order that are enough together; those without use left out."""
        kept: list[Change] = []
        least: int | None = None
        self._done.clear()
        for ladder in self._candidates:
            below = _all(kept)
            strongest = self._strongest(ladder, below)
            trial = None if strongest is None else self._trial(ladder[strongest].over(below))
            if strongest is None or trial is None or trial.fit is None:
                continue
            if trial.fit.fits:
                return self._without_needless(kept, ladder)
            missing = sum(trial.fit.lacking.values())
            if least is None or missing < USEFUL * least:
                kept, least = [*kept, ladder[strongest]], missing
        return []

    def _without_needless(self, kept: list[Change], ladder: Sequence[Change]) -> list[Fitting]:
        for change in reversed(kept):
            fewer = [one for one in kept if one is not change]
            if self._mildest(ladder[-1:], _all(fewer)) is not None:
                kept = fewer
        found = self._mildest(ladder, _all(kept))
        return [] if found is None else [found]

    def _strongest(self, ladder: Sequence[Change], below: Change) -> int | None:
        """Of a list, the last that is not refused."""
        numbers = reversed(range(len(ladder)))
        return next((n for n in numbers if self._trial(ladder[n].over(below))), None)

    def _mildest(self, ladder: Sequence[Change], below: Change) -> Fitting | None:
        """The first of a list that fits; None if the strongest does not."""
        low, high = 0, self._strongest(ladder, below)
        best = None if high is None else self._fitting(ladder[high].over(below))
        while best is not None and high is not None and low < high:
            middle = (low + high) // 2
            milder = self._fitting(ladder[middle].over(below))
            if milder is None:
                low = middle + 1
            else:
                best, high = milder, middle
        return best

    def _fitting(self, change: Change) -> Fitting | None:
        trial = self._trial(change)
        return None if trial is None or not trial.fits else Fitting(change=change, trial=trial)

    def _trial(self, change: Change) -> Trial | None:
        """None: it is refused, or there were enough rehearsals."""
        key = json.dumps(change.lines, sort_keys=True)
        if key not in self._done:
            self._done[key] = None
            if sum(trial is not None for trial in self._done.values()) < MOST_TRIALS:
                with contextlib.suppress(AnygaugeError):
                    run = changed(self._run, change.lines)
                    self._done[key] = self._try(run, self._target)
        return self._done[key]


MOST_PROBES = 12
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

    return _Bisection(run, target, tried, lines).found(size)


def largest_sequence(run: RunFile, target: Target, tried: Try) -> Largest:
    """The most tokens in a row."""

    def lines(size: int) -> Change:
        return Change(lines={"data.max_length": size * PLACES}, costs="rows are longer or shorter")

    return _Bisection(run, target, tried, lines).found(max(1, run.data.max_length // PLACES))


class _Bisection:
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
        while self._high - self._low > 1 and len(self._left) < MOST_PROBES:
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
