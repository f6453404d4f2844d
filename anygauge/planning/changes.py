"""Finds what to change of a run, what else its ranks could be, and the largest of it that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.config.sections import QuantizeSection
from anygauge.config.yaml_text import write_flow
from anygauge.interface import AnygaugeError, StrategySpec
from anygauge.kernels.choose import LOSS, REFERENCE
from anygauge.planning.trials import Target, Trial, Trials, with_changes
from anygauge.registry import Provided, Registry
from anygauge.registry.specs import load_options
from anygauge.training.auto import AUTO
from anygauge.training.build_strategy import share_of

MIN_GAIN = 0.01
"""Of a card's memory: a change that gains less, and no verdict, is left out."""
MIN_LENGTH = 128
"""Tokens of a row that is not made shorter."""
BATCH, ROWS = "train.micro_batch_size", "data.max_length"
DEGREES = ("cp", "tp", "pp")
"""Fields of a strategy by which rows and layers are divided: another strategy keeps them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Another form of a run, or another place for it.

    Attributes:
        name: in words; of a change, what it costs.
        lines: dotted path -> value in its run file; ``strategy`` is the whole section.
        trial: None where it is not tried yet, or refused.
        why: it is refused, or no larger one is tried.
    """

    name: str
    lines: Mapping[str, Any] = field(default_factory=dict)
    trial: Trial | None = None
    why: str = ""

    @property
    def margin(self) -> float:
        """See `Fit.margin`; what is refused has the least."""
        return -math.inf if self.trial is None else self.trial.margin

    @property
    def options(self) -> list[str]:
        """The lines for a command line, each to stand behind ``--set``."""
        lines = dict(self.lines)
        section = dict(lines.pop("strategy", {}))
        if section:
            lines["strategy"] = section.pop("name")
        lines |= {f"strategy.{name}": value for name, value in section.items()}
        return [f"{path}={write_flow(value)}" for path, value in lines.items()]

    def plan(self, run: RunFile, target: Target, tried: Trials) -> Choice:
        """This one, planned; a refusal is an answer."""
        try:
            run = with_changes(run, self.lines) if self.lines else run
            return replace(self, trial=tried(run, target))
        except AnygaugeError as error:
            return replace(self, why=str(error))

    def record(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        none = dict.fromkeys(("ranks", "phase", "fit", "time"))
        found = {"name": self.name, "lines": dict(self.lines), "set": self.options}
        trial = none if self.trial is None else self.trial.record()
        return {**found, "why": self.why or None, **trial}


# -- what to change --------------------------------------------------------------------------------


def _eight_changes(
    trial: Trial, registry: Registry, batch: Choice, rows: Choice
) -> Iterator[Sequence[Choice]]:
    """Changes that take memory away, those that cost least first; eight at most.

    Each is a list of ways to do it: the first that fits is taken. What a configuration or a
    backend refuses is among them.
    """
    run, ranks = trial.run, trial.ranks
    parts = share_of(run, registry, 0, ranks).count
    if trial.memory.kernels.get(LOSS) == REFERENCE:
        yield [
            Choice("logits are made in parts, twice", {f"kernels.{LOSS}": p.spec.name})
            for p in registry.kernels
            if p.spec.operation == LOSS and p.spec.default and not p.spec.device_types
        ]
    sharded, offloaded, all_offloaded = _lighter_runs(run, registry)
    yield sharded if ranks > 1 else []
    size, share = run.train.sequences_at_once(parts), run.train.global_batch_size // parts
    most = min(size - 1, batch.lines.get(BATCH, 1))
    fewer = [n for n in range(most, 0, -1) if share % n == 0]
    yield [Choice("more, smaller forwards", {BATCH: n}) for n in fewer[:1]]
    if run.train.activations.every != 1 or run.train.activations.selective:
        costs = "layers are computed twice: a third more arithmetic"
        yield [Choice(costs, {"train.gradient_checkpointing": True})]
    yield offloaded
    yield all_offloaded
    yield list(_smaller_base(run))
    length = rows.lines.get(ROWS, run.data.max_length // 2)
    if MIN_LENGTH <= length < run.data.max_length:
        yield [Choice("longer rows are cut", {ROWS: length})]


def _smaller_base(run: RunFile) -> Iterator[Choice]:
    if run.adapter is None:
        yield Choice("an adapter in place of all weights", {"adapter": {"r": 16}})
        return
    given, costs = run.model.quantize, "the base has 4 bits: some loss of quality"
    scales = "its scales have 8"
    if given is None:
        yield Choice(costs, {"model.quantize": "nf4"})
        given, scales = "nf4", f"{costs}; {scales}"
    section = given if isinstance(given, QuantizeSection) else QuantizeSection(type=given)
    if section.type == "nf4" and not section.double_quantization:
        double = {**section.model_dump(), "double_quantization": True}
        yield Choice(scales, {"model.quantize": double})


def _lighter_runs(run: RunFile, registry: Registry) -> Sequence[list[Choice]]:
    """What strategies propose: to divide, to offload some of it, to offload all; the run's own
    first, then the fastest. Nothing that takes no less than what the run has."""
    section = values_of(run)["strategy"]
    kept = {name: section[name] for name in DEGREES if section.get(name, 1) > 1}
    levels: tuple[list[Choice], ...] = ([], [], [])
    has = -1

    def fastest(one: Provided[StrategySpec]) -> tuple[bool, int]:
        places = [form.place for form in one.spec.hints.auto]
        return one.spec.name != section["name"], min(places, default=99)

    for provided in sorted(registry.strategies, key=fastest):
        spec = provided.spec
        if kept.keys() - load_options(provided).model_fields.keys():
            continue  # the run's own division would be lost
        for index, (fields, costs) in enumerate(spec.hints.lighter):
            level = 0 if index == 0 else 2 if index == len(spec.hints.lighter) - 1 else 1
            change = Choice(costs, {"strategy": {"name": spec.name, **kept, **fields}})
            levels[level].append(change)
            if spec.name == section["name"] and with_changes(run, change.lines) == run:
                has = level
    return [changes if level > has else [] for level, changes in enumerate(levels)]


def what_to_change(trial: Trial, tried: Trials, batch: Choice, rows: Choice) -> Iterator[Choice]:
    """Each change that makes the run fit, or gains something; of several ways, the first that fits,
    or else the one that lacks least.

    Args:
        trial: of the run; its card's memory is known.
        batch, rows: the largest that fit.
    """
    assert trial.fit is not None
    for ways in _eight_changes(trial, tried.registry, batch, rows):
        found: list[Choice] = []
        for way in ways:
            found.append(way.plan(trial.run, trial.target, tried))
            if found[-1].margin >= 0:
                break
        best = max(found, key=lambda one: one.margin, default=Choice(""))
        gained = best.margin - trial.margin > MIN_GAIN * trial.fit.memory
        if gained or best.margin >= 0 > trial.margin:
            yield best


# -- the largest that fits -------------------------------------------------------------------------

MOST_PLANS = 8
"""Of one answer: two give a line, two check what it says; more where it is none."""
MOST_SEQUENCES = 1024
MOST_TOKENS = 2**20
TOKENS = 64
"""Lengths of rows that are tried are multiples of it."""


def largest_batch(trial: Trial, tried: Trials) -> Choice:
    """The most sequences per forward; a step has as many forwards as before."""
    run = trial.run
    size = run.train.sequences_at_once(share_of(run, tried.registry, 0, trial.ranks).count)
    forwards = run.train.global_batch_size // size

    def lines(size: int) -> Mapping[str, int]:
        return {BATCH: size, "train.global_batch_size": size * forwards}

    ended_by = f"no more than {MOST_SEQUENCES:,} are tried"
    return _find_largest("batch", trial, tried, lines, (size, 1, MOST_SEQUENCES), ended_by)


def longest_rows(trial: Trial, tried: Trials) -> Choice:
    """The most tokens in a row."""
    most, ended_by = MOST_TOKENS, f"no more than {MOST_TOKENS:,} are tried"
    if (positions := trial.memory.positions) and positions < most:
        most, ended_by = positions, "the model was made for no more positions"
    sizes = trial.run.data.max_length, TOKENS, most
    return _find_largest("rows", trial, tried, lambda size: {ROWS: size}, sizes, ended_by)


def _find_largest(
    name: str,
    trial: Trial,
    tried: Trials,
    lines: Callable[[int], Mapping[str, int]],
    sizes: tuple[int, int, int],
    ended_by: str,
) -> Choice:
    """Search with the formula through known plans, until a plan agrees.

    Args:
        sizes: the run's, of which multiples are tried, and the most that is.

    Returns:
        With no lines and no trial: not even the smallest fits.
    """
    first, unit, most = sizes
    plans: dict[int, Trial] = {first: trial}
    for _ in range(MOST_PLANS):
        best = max((number for number, one in plans.items() if one.fits), default=0)
        over = min((number for number, one in plans.items() if not one.fits), default=None)
        least = min(most, (best // unit + 1) * unit)
        largest = most if over is None else (over - 1) // unit * unit
        if not best < least <= largest:
            break
        guess = _solve(plans) if len(plans) > 1 else first * (2 if trial.fits else 0.5)
        number = most if guess >= most else int(guess) // unit * unit
        number = max(least, min(number, largest))
        found = Choice(name, lines(number)).plan(trial.run, trial.target, tried)
        if found.trial is None:
            most, ended_by = best, f"{number:,} is refused: {found.why}"
            break
        plans[number] = found.trial
    best = max((number for number, one in plans.items() if one.fits), default=0)
    if not best:
        return Choice(name)
    return Choice(name, lines(best), plans[best], ended_by if best + unit > most else "")


def _solve(plans: Mapping[int, Trial]) -> float:
    """Find where nothing is left: by a line through two plans, or between two far ones."""
    margins = sorted(((n, one.margin) for n, one in plans.items()), key=lambda one: abs(one[1]))
    fitting = [one for one in margins if one[1] >= 0][:1]
    over = [one for one in margins if one[1] < 0][:1]
    (a, at_a), (b, at_b) = [*fitting, *over] if fitting and over else margins[:2]
    if at_a >= 0 > at_b and b > 2 * a:
        return math.sqrt(a * b)
    return math.inf if at_a == at_b else a + at_a * (b - a) / (at_a - at_b)


# -- every layout of the ranks ---------------------------------------------------------------------

CHOICES: Mapping[str, Sequence[Any]] = {
    "stage": (0, 1, 2, 3),
    "offload": ("optimizer", "parameters", "both"),
}
"""Fields of a strategy's options that decide what a rank holds, with what they may have; those of
third parties too."""


def _layouts(registry: Registry, ranks: int, devices: int) -> Iterator[Choice]:
    """Each strategy as it is, and with each field changed once.

    Args:
        ranks: of the run.
        devices: ranks on one machine: layers and sequences are divided over no more.
    """
    degrees = [degree for degree in range(2, ranks + 1) if ranks % degree == 0]
    choices: dict[str, Sequence[Any]] = {
        name: [one for one in degrees if one <= devices] for name in DEGREES
    }
    choices |= {"dp_replicate": [one for one in degrees if one < ranks], **CHOICES}
    for provided in registry.strategies:
        spec = provided.spec
        if spec.name == AUTO or (spec.single_process and ranks > 1):
            continue
        yield Choice(spec.name, {"strategy": {"name": spec.name}})
        options = load_options(provided)
        for name, values in choices.items():
            for value in values if name in options.model_fields else ():
                if value != options.model_fields[name].default:
                    with suppress(ValidationError):
                        options.model_validate({name: value})
                        section = {"name": spec.name, name: value}
                        yield Choice(f"{spec.name}, {name} {value}", {"strategy": section})


def try_strategies(trial: Trial, tried: Trials) -> Sequence[Choice]:
    """Every layout of a run's ranks: those that fit first, the fastest first."""

    def order(row: Choice) -> tuple[bool, bool, float]:
        """Sort by time, or by need where there is no time."""
        if (found := row.trial) is None:
            return True, True, 0
        needed = found.memory.worst_phase[1].total if found.fit is None else found.fit.needs
        slow = needed if found.time is None else found.time.step
        return False, found.fit is not None and not found.fit.fits, slow

    layouts = _layouts(tried.registry, trial.ranks, trial.run.launch.devices)
    return sorted((one.plan(trial.run, trial.target, tried) for one in layouts), key=order)
