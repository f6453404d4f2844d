"""What to change of a run, what else its ranks could be, and the largest of it that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.config.sections import QuantiseSection
from anygauge.interface import AnygaugeError
from anygauge.kernels.choose import LOSS, REFERENCE
from anygauge.planning.trials import Target, Trial, Try, changed
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.training.auto import AUTO
from anygauge.training.strategy import share_of

USEFUL = 0.01
"""Of a card's memory: a change that gains less, and no verdict, is left out."""
SHORTEST = 128
"""Tokens of a row that is not made shorter."""
DEGREES = ("cp", "tp", "pp")
"""Fields of a strategy by which rows and layers are divided: another strategy keeps them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Lines of a run file, and what they cost.

    Attributes:
        lines: dotted path -> value; ``strategy`` is the whole section.
        costs: in words.
    """

    lines: Mapping[str, Any]
    costs: str

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


def _all(changes: Sequence[Change]) -> Change:
    """All of them; a later one over an earlier one."""
    lines: dict[str, Any] = {}
    for change in changes:
        lines |= change.lines
    return Change(lines=lines, costs="; ".join(change.costs for change in changes))


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedTrial:
    """A change, and the run with it.

    Attributes:
        together: it is several changes, none of which is enough.
    """

    change: Change
    trial: Trial
    together: bool = False

    def record(self) -> dict[str, Any]:
        """What JSON can hold."""
        change, fit, time = self.change, self.trial.fit, self.trial.time
        assert fit is not None, "there is a card to hold it against"
        return {
            "lines": dict(change.lines),
            "set": change.options,
            "yaml": change.text,
            "costs": change.costs,
            "together": self.together,
            "fits": fit.fits,
            "needed": fit.needed,
            "left": fit.left,
            "step": None if time is None else time.step,
        }


# -- what to change --------------------------------------------------------------------------------


def eight_changes(
    trial: Trial, registry: Registry, batch: Largest, rows: Largest
) -> Iterator[Sequence[Change]]:
    """Changes that take memory away, those that cost least first; eight at most.

    Each is a list of ways to do it: the first that fits is taken. What a configuration or a
    backend refuses is among them.

    Args:
        batch, rows: the largest that fit.
    """
    run, ranks = trial.run, trial.run.launch.nodes * trial.run.launch.devices
    parts = share_of(run, registry, 0, ranks).count
    if trial.memory.kernels.get(LOSS) == REFERENCE:
        yield [
            Change(lines={f"kernels.{LOSS}": p.spec.name}, costs="logits are made in parts, twice")
            for p in registry.kernels
            if p.spec.operation == LOSS and p.spec.default and not p.spec.device_types
        ]
    sharded, offloaded, all_offloaded = _lighter(run, registry)
    if ranks > 1:
        yield sharded
    size, most = run.train.sequences_at_once(parts), max(1, batch.number)
    share = run.train.global_batch_size // parts
    fewer = [n for n in range(min(size - 1, most), 0, -1) if share % n == 0]
    if fewer:
        yield [Change(lines={"train.micro_batch_size": fewer[0]}, costs="more, smaller forwards")]
    if run.train.activations.every != 1 or run.train.activations.selective:
        costs = "layers are computed twice: a third more arithmetic"
        yield [Change(lines={"train.gradient_checkpointing": True}, costs=costs)]
    yield offloaded
    yield all_offloaded
    yield list(_smaller_base(run))
    length = rows.number or run.data.max_length // 2
    if SHORTEST <= length < run.data.max_length:
        yield [Change(lines={"data.max_length": length}, costs="longer rows are cut")]


def _smaller_base(run: RunFile) -> Iterator[Change]:
    if run.adapter is None:
        yield Change(lines={"adapter": {"r": 16}}, costs="an adapter in place of all weights")
    elif run.model.quantise is None:
        costs = "the base has 4 bits: some loss of quality"
        yield Change(lines={"model.quantise": "nf4"}, costs=costs)
        double = {"type": "nf4", "double_quantisation": True}
        yield Change(lines={"model.quantise": double}, costs=f"{costs}; its scales have 8")
    else:
        given = run.model.quantise
        section = given if isinstance(given, QuantiseSection) else QuantiseSection(type=given)
        if section.type == "nf4" and not section.double_quantisation:
            double = {**section.model_dump(), "double_quantisation": True}
            yield Change(lines={"model.quantise": double}, costs="the base's scales have 8 bits")


def _lighter(run: RunFile, registry: Registry) -> tuple[list[Change], list[Change], list[Change]]:
    """What strategies propose: to divide, to offload some of it, to offload all; the run's own
    first, then the fastest. Nothing that takes more than what the run has."""
    section = values_of(run)["strategy"]
    kept = {name: section[name] for name in DEGREES if section.get(name, 1) > 1}
    own: list[Change] = []
    others: list[list[Change]] = []
    for provided in sorted(
        registry.strategies, key=lambda one: min([f.place for f in one.spec.auto], default=99)
    ):
        spec = provided.spec
        if not spec.lighter or kept.keys() - load_options(provided, "strategy").model_fields.keys():
            continue  # the run's own division would be lost
        proposed = [
            Change(lines={"strategy": {"name": spec.name, **kept, **fields}}, costs=costs)
            for fields, costs in spec.lighter
        ]
        if spec.name == section["name"]:
            own = proposed
        else:
            others.append(proposed)
    level = next((n for n, one in enumerate(own) if changed(run, one.lines) == run), -1)
    first = own[:1] if level < 0 else []
    first += [one[0] for one in others if level < 0]
    middle = own[max(1, level + 1) : -1] + [c for one in others if level < 1 for c in one[1:-1]]
    last = own[max(1, level + 1) :][-1:]
    last += [one[-1] for one in others if len(one) > 1 and (last or not own)]
    return first, middle, last


def what_to_change(
    trial: Trial, target: Target, tried: Try, registry: Registry, batch: Largest, rows: Largest
) -> Iterator[ChangedTrial]:
    """Each change that gains something; where none fits, at the end as few together as fit.

    Args:
        trial: of the run; its card's memory is known.
    """
    ways = [one for one in eight_changes(trial, registry, batch, rows) if one]
    fits, margin = trial.fits, _margin(trial)
    for each in ways:
        found = _first_that_fits(trial.run, [], each, target, tried)
        if found is not None and _gains(found.trial, trial):
            fits |= found.trial.fits
            yield found
    if fits:
        return
    kept: list[Change] = []
    for each in ways:
        found = _first_that_fits(trial.run, kept, each, target, tried)
        if found is None or _margin(found.trial) <= margin:
            continue
        kept.append(found.change)
        margin = _margin(found.trial)
        if found.trial.fits:
            yield _without_needless(trial.run, kept, target, tried)
            return


def _without_needless(run: RunFile, kept: list[Change], target: Target, tried: Try) -> ChangedTrial:
    """Changes that fit together; of them, those without which they do not, the costly ones first
    left out."""
    for change in reversed(kept):
        fewer = [one for one in kept if one is not change]
        found = _first_that_fits(run, fewer[:-1], fewer[-1:], target, tried)
        if found is not None and found.trial.fits:
            kept = fewer
    together = _all(kept)
    trial = tried(changed(run, together.lines), target)
    return ChangedTrial(change=together, trial=trial, together=True)


def _first_that_fits(
    run: RunFile, below: Sequence[Change], ways: Sequence[Change], target: Target, tried: Try
) -> ChangedTrial | None:
    """Of several ways, over other changes; where none fits, the one that lacks least; None: all
    are refused."""
    best: ChangedTrial | None = None
    for change in ways:
        try:
            lines = _all([*below, change]).lines
            found = ChangedTrial(change=change, trial=tried(changed(run, lines), target))
        except AnygaugeError:
            continue
        if found.trial.fits:
            return found
        if best is None or _margin(found.trial) > _margin(best.trial):
            best = found
    return best


def _margin(trial: Trial) -> int:
    assert trial.fit is not None, "there is a card to hold it against"
    return trial.fit.margin


def _gains(one: Trial, other: Trial) -> bool:
    assert one.fit is not None
    return one.fits > other.fits or _margin(one) - _margin(other) > USEFUL * one.fit.memory


# -- the largest that fits -------------------------------------------------------------------------

MOST_PLANS = 6
"""Of one answer: two give a line, one checks what it says; more where it is none."""
MOST_SEQUENCES = 1024
MOST_TOKENS = 2**20
TOKENS = 64
"""Lengths of rows that are tried are multiples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest number that fits.

    Attributes:
        number: 0: not even the smallest fits.
        change: what to write; None: nothing fits.
        trial: of that number.
        ended_by: why more is not tried; "" where more does not fit.
    """

    number: int
    change: Change | None
    trial: Trial | None
    ended_by: str = ""

    def record(self) -> dict[str, Any]:
        """What JSON can hold."""
        fit = None if self.trial is None else self.trial.fit
        return {
            "number": self.number,
            "lines": None if self.change is None else dict(self.change.lines),
            "needed": None if fit is None else fit.needed,
            "left": None if fit is None else fit.left,
            "ended_by": self.ended_by or None,
        }


def largest_batch(trial: Trial, target: Target, tried: Try, registry: Registry) -> Largest:
    """The most sequences per forward; a step has as many forwards as before."""
    run, ranks = trial.run, trial.run.launch.nodes * trial.run.launch.devices
    size = run.train.sequences_at_once(share_of(run, registry, 0, ranks).count)
    forwards = run.train.global_batch_size // size

    def lines(size: int) -> Change:
        batch = {"train.micro_batch_size": size, "train.global_batch_size": size * forwards}
        return Change(lines=batch, costs=f"a step has {size * forwards:,} sequences")

    ended_by = f"no more than {MOST_SEQUENCES:,} are tried"
    return _largest(trial, target, tried, lines, size, 1, MOST_SEQUENCES, ended_by)


def longest_rows(trial: Trial, target: Target, tried: Try) -> Largest:
    """The most tokens in a row."""

    def lines(size: int) -> Change:
        return Change(lines={"data.max_length": size}, costs="rows are longer or shorter")

    most, ended_by = MOST_TOKENS, f"no more than {MOST_TOKENS:,} are tried"
    if (positions := trial.memory.positions) and positions < most:
        most, ended_by = positions, "the model was made for no more positions"
    return _largest(trial, target, tried, lines, trial.run.data.max_length, TOKENS, most, ended_by)


def _largest(
    trial: Trial,
    target: Target,
    tried: Try,
    lines: Callable[[int], Change],
    first: int,
    unit: int,
    most: int,
    ended_by: str,
) -> Largest:
    """What the formula through known plans says, until a plan of that agrees."""
    plans: dict[int, Trial] = {first: trial}
    for _ in range(MOST_PLANS):
        if len(plans) > 1:
            number = _solved(plans, unit, most)
        else:
            number = 2 * first if trial.fits else max(unit, first // 2)
        number = max(min(unit, most), min(number, most))
        if number in plans:
            break
        try:
            plans[number] = tried(changed(trial.run, lines(number).lines), target)
        except AnygaugeError as error:
            most, ended_by = first, f"{number:,} is refused: {error}"
            break
    fitting = [number for number, found in plans.items() if found.fits]
    if not fitting:
        return Largest(number=0, change=None, trial=None)
    best = max(fitting)
    reason = ended_by if best + unit > most else ""
    return Largest(number=best, change=lines(best), trial=plans[best], ended_by=reason)


def _solved(plans: Mapping[int, Trial], unit: int, most: int) -> int:
    """The largest multiple of `unit` with which all that is needed is there, by the curves through
    the plans that are nearest to that: of each phase, and of what ranks share."""
    over = sorted(number for number, found in plans.items() if not found.fits)[:2]
    under = sorted((n for n, found in plans.items() if found.fits), reverse=True)[: 3 - len(over)]
    near = [*under[:1], *over[:1], *under[1:], *over[1:]]
    curves: list[tuple[Callable[[float], float], int]] = []
    for name in _against(plans[near[0]]):
        points = [(n, _against(plans[n])[name]) for n in near if name in _against(plans[n])]
        curves.append((_curve([(n, needed) for n, (needed, _) in points]), points[0][1][1]))
    low, high = 0, most // unit
    while low < high:
        middle = (low + high + 1) // 2
        if all(curve(middle * unit) <= has for curve, has in curves):
            low = middle
        else:
            high = middle - 1
    return low * unit if low * unit + unit <= most else most


def _against(trial: Trial) -> Mapping[str, tuple[int, int]]:
    assert trial.fit is not None, "there is a card to hold it against"
    return trial.fit.against


def _curve(points: Sequence[tuple[int, int]]) -> Callable[[float], float]:
    """Through one to three points; a line where it would bend down."""
    (a, at_a), *others = points
    if not others:
        return lambda x: at_a
    (b, at_b), *last = others
    slope = (at_b - at_a) / (b - a)
    bend = 0.0
    for c, at_c in last:
        bend = max(0.0, ((at_c - at_b) / (c - b) - slope) / (c - a))
    return lambda x: at_a + (x - a) * (slope + bend * (x - b))


# -- every layout of the ranks ---------------------------------------------------------------------

DIVIDED = ("dp_replicate", *DEGREES)
"""Fields of a strategy's options by which ranks are divided; those of third parties too."""
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload": ("optimizer", "parameters", "both"),
}
"""Further fields that decide what a rank holds, with what they may have."""


def layouts(registry: Registry, ranks: int, devices: int) -> Iterator[Mapping[str, Any]]:
    """Sections `strategy` of run files: each strategy as it is, and with each field changed once.

    Args:
        ranks: of the run.
        devices: ranks on one machine: layers and sequences are divided over no more.
    """
    for provided in registry.strategies:
        spec = provided.spec
        if spec.name == AUTO or (spec.world_sizes and ranks not in spec.world_sizes):
            continue
        yield {"name": spec.name}
        options = load_options(provided, "strategy")
        fields = options.model_fields
        for name in DIVIDED:
            most = ranks - 1 if name == "dp_replicate" else devices
            for degree in range(2, most + 1):
                if name in fields and ranks % degree == 0:
                    yield {"name": spec.name, name: degree}
        for name, values in CHOICES.items():
            for value in values:
                if (
                    name in fields
                    and fields[name].default != value
                    and _takes(options, name, value)
                ):
                    yield {"name": spec.name, name: value}


def _takes(options: type[BaseModel], name: str, value: Any) -> bool:
    try:
        options.model_validate({name: value})
    except ValidationError:
        return False
    return True


def section_in_words(section: Mapping[str, Any]) -> str:
    """A section in a few words: ``zero, stage 2``."""
    rest = [f"{name} {value}" for name, value in section.items() if name != "name"]
    return ", ".join([section["name"], *rest])
