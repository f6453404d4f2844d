"""What to change of a run, what else its ranks could be, and the largest of it that fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.config.sections import QuantiseSection
from anygauge.interface import AnygaugeError
from anygauge.kernels.choose import LOSS, REFERENCE
from anygauge.planning.machines import Machine
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
        lines = dict(self.lines)
        section = dict(lines.pop("strategy", {}))
        found = [f"{path}={_inline(value)}" for path, value in lines.items()]
        if section:
            found.append(f"strategy={section.pop('name')}")
        return found + [f"strategy.{name}={_inline(value)}" for name, value in section.items()]

    @property
    def text(self) -> str:
        """The same as YAML, to be pasted into a run file."""
        tree: dict[str, Any] = {}
        for path, value in self.lines.items():
            section, _, name = path.rpartition(".")
            if section:
                tree.setdefault(section, {})[name] = value
            else:
                tree[name] = value
        return "\n".join(f"{key}: {_inline(value)}" for key, value in tree.items())

    def over(self, others: Sequence[Change]) -> Change:
        """This one, and others where it says nothing."""
        every = (*others, self)
        lines = {path: value for one in every for path, value in one.lines.items()}
        return Change(lines=lines, costs="; ".join(one.costs for one in every))


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
    yield sharded if ranks > 1 else []
    size, most = run.train.sequences_at_once(parts), max(1, batch.number)
    share = run.train.global_batch_size // parts
    fewer = [n for n in range(min(size - 1, most), 0, -1) if share % n == 0]
    costs = "more, smaller forwards"
    yield [Change(lines={"train.micro_batch_size": n}, costs=costs) for n in fewer[:1]]
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
        return
    given, costs = run.model.quantise, "the base has 4 bits: some loss of quality"
    scales = "its scales have 8"
    if given is None:
        yield Change(lines={"model.quantise": "nf4"}, costs=costs)
        given, scales = "nf4", f"{costs}; {scales}"
    section = given if isinstance(given, QuantiseSection) else QuantiseSection(type=given)
    if section.type == "nf4" and not section.double_quantisation:
        double = {**section.model_dump(), "double_quantisation": True}
        yield Change(lines={"model.quantise": double}, costs=scales)


def _lighter(run: RunFile, registry: Registry) -> Sequence[list[Change]]:
    """What strategies propose: to divide, to offload some of it, to offload all; the run's own
    first, then the fastest. Nothing that takes no less than what the run has."""
    section = values_of(run)["strategy"]
    kept = {name: section[name] for name in DEGREES if section.get(name, 1) > 1}
    levels: tuple[list[Change], ...] = ([], [], [])
    has = -1
    fastest = {
        p.spec.name: min([f.place for f in p.spec.auto], default=99) for p in registry.strategies
    }
    for provided in sorted(
        registry.strategies,
        key=lambda one: (one.spec.name != section["name"], fastest[one.spec.name]),
    ):
        spec = provided.spec
        if kept.keys() - load_options(provided, "strategy").model_fields.keys():
            continue  # the run's own division would be lost
        for index, (fields, costs) in enumerate(spec.lighter):
            level = 0 if index == 0 else 2 if index == len(spec.lighter) - 1 else 1
            change = Change(lines={"strategy": {"name": spec.name, **kept, **fields}}, costs=costs)
            levels[level].append(change)
            if spec.name == section["name"] and changed(run, change.lines) == run:
                has = level
    return [changes if level > has else [] for level, changes in enumerate(levels)]


def what_to_change(
    trial: Trial, target: Target, tried: Try, registry: Registry, batch: Largest, rows: Largest
) -> Iterator[ChangedTrial]:
    """Each change that gains something; where none fits, at the end as few together as fit.

    Args:
        trial: of the run; its card's memory is known.
    """
    ways = [one for one in eight_changes(trial, registry, batch, rows) if one]
    fits, margin = trial.fits, trial.margin
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
        if found is None or found.trial.margin <= margin:
            continue
        kept.append(found.change)
        margin = found.trial.margin
        if found.trial.fits:
            break
    else:
        return
    for change in reversed(kept):  # those that cost most are left out first, if the rest fits
        fewer = [one for one in kept if one is not change]
        found = _first_that_fits(trial.run, fewer[:-1], fewer[-1:], target, tried)
        kept = fewer if found is not None and found.trial.fits else kept
    found = _first_that_fits(trial.run, [], [kept[-1].over(kept[:-1])], target, tried)
    assert found is not None, "it was planned"
    yield replace(found, together=True)


def _first_that_fits(
    run: RunFile, below: Sequence[Change], ways: Sequence[Change], target: Target, tried: Try
) -> ChangedTrial | None:
    """Of several ways, over other changes; where none fits, the one that lacks least; None: all
    are refused."""
    best: ChangedTrial | None = None
    for change in ways:
        try:
            lines = change.over(below).lines
            found = ChangedTrial(change=change, trial=tried(changed(run, lines), target))
        except AnygaugeError:
            continue
        if found.trial.fits:
            return found
        if best is None or found.trial.margin > best.trial.margin:
            best = found
    return best


def _gains(one: Trial, other: Trial) -> bool:
    assert one.fit is not None
    return one.fits > other.fits or one.margin - other.margin > USEFUL * one.fit.memory


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
    number = 2 * first if trial.fits else max(unit, first // 2)
    for _ in range(MOST_PLANS):
        number = max(min(unit, most), min(number, most))
        if number in plans:
            break
        try:
            plans[number] = tried(changed(trial.run, lines(number).lines), target)
        except AnygaugeError as error:
            most, ended_by = first, f"{number:,} is refused: {error}"
            break
        number = _solved(plans, unit, most)
    best = max((number for number, found in plans.items() if found.fits), default=0)
    if not best:
        return Largest(number=0, change=None, trial=None)
    reason = ended_by if best + unit > most else ""
    return Largest(number=best, change=lines(best), trial=plans[best], ended_by=reason)


def _solved(plans: Mapping[int, Trial], unit: int, most: int) -> int:
    """The largest multiple of `unit` with which all that is needed is there, by the curves through
    the plans that are nearest to that: of each phase, and of what ranks share."""
    over = sorted(number for number, found in plans.items() if not found.fits)[:2]
    under = sorted((n for n, found in plans.items() if found.fits), reverse=True)[: 3 - len(over)]
    near = {n: plans[n].against for n in (*under[:1], *over[:1], *under[1:], *over[1:])}
    curves = [
        (_curve([(n, needs[name][0]) for n, needs in near.items() if name in needs]), has)
        for name, (_, has) in next(iter(near.values())).items()
    ]
    units = bisect_left(
        range(1, most // unit + 1),
        True,
        key=lambda count: any(curve(count * unit) > has for curve, has in curves),
    )
    return units * unit if (units + 1) * unit <= most else most


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

CHOICES: Mapping[str, Sequence[Any]] = {
    "stage": (0, 1, 2, 3),
    "offload": ("optimizer", "parameters", "both"),
}
"""Fields of a strategy's options that decide what a rank holds, with what they may have; those of
third parties too."""


def layouts(registry: Registry, ranks: int, devices: int) -> Iterator[Mapping[str, Any]]:
    """Sections `strategy` of run files: each strategy as it is, and with each field changed once.

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
        if spec.name == AUTO or (spec.world_sizes and ranks not in spec.world_sizes):
            continue
        yield {"name": spec.name}
        options = load_options(provided, "strategy")
        for name, values in choices.items():
            for value in values if name in options.model_fields else ():
                if value != options.model_fields[name].default:
                    with suppress(ValidationError):
                        options.model_validate({name: value})
                        yield {"name": spec.name, name: value}


def section_in_words(section: Mapping[str, Any]) -> str:
    """A section in a few words: ``zero, stage 2``."""
    rest = [f"{name} {value}" for name, value in section.items() if name != "name"]
    return ", ".join([section["name"], *rest])


# -- other machines and strategies, and what all comes to -----------------------------------------

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One of several ways: on another machine, on more of them, or with another strategy.

    Attributes:
        trial: None where the run is refused.
        refused: why.
    """

    name: str
    card: str
    ranks: int
    trial: Trial | None
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """What JSON can hold."""
        trial = self.trial
        phase, peak = (None, None) if trial is None else trial.memory.worst
        fit, time = (None, None) if trial is None else (trial.fit, trial.time)
        return {
            "name": self.name,
            "card": self.card or None,
            "ranks": self.ranks,
            "tensors": None if peak is None else peak.total,
            "phase": phase,
            "fit": None if fit is None else fit.record(),
            "time": None if time is None else time.record(),
            "refused": self.refused or None,
        }


def ranks_of(run: RunFile) -> int:
    """All of its ranks."""
    return run.launch.nodes * run.launch.devices


def row(
    run: RunFile, target: Target, tried: Try, name: str = "", lines: Mapping[str, Any] | None = None
) -> PlanRow:
    """A run somewhere; a refusal is an answer.

    Args:
        name: empty: that of the machine.
        lines: what is changed of it.
    """
    name = name or ("this machine" if target.machine is None else target.machine.name)
    card = "" if target.card is None else target.card.name
    trial, refused = None, ""
    try:
        trial = tried(changed(run, lines) if lines else run, target)
    except AnygaugeError as error:
        refused = str(error)
    return PlanRow(name=name, card=card, ranks=ranks_of(run), trial=trial, refused=refused)


def try_strategies(
    run: RunFile, target: Target, tried: Try, registry: Registry
) -> Sequence[PlanRow]:
    """Every layout that a number of ranks can have: those that fit first, the fastest first."""
    sections = layouts(registry, ranks_of(run), run.launch.devices)
    rows = [row(run, target, tried, section_in_words(s), {"strategy": s}) for s in sections]
    return sorted(rows, key=_order)


def _order(row: PlanRow) -> tuple[bool, bool, float]:
    """Without a time, by what is needed."""
    trial = row.trial
    if trial is None:
        return True, True, 0
    needed = trial.memory.worst[1].total if trial.fit is None else trial.fit.needed
    slow = needed if trial.time is None else trial.time.step
    return False, trial.fit is not None and not trial.fit.fits, slow


def total_times(trial: Trial, machine: Machine | None, rows: int | None) -> list[dict[str, Any]]:
    """An epoch, and the run: ``of`` which, ``steps``, ``seconds``, ``money`` in the currency
    of the machine's price; None where it has none.

    Args:
        rows: of the training data; None: not known.
    """
    if trial.time is None:
        return []
    train, machines = trial.run.train, trial.run.launch.nodes
    lengths = {"epoch": 1, "run": train.epochs}
    steps = {
        of: math.ceil(rows * epochs / train.global_batch_size)
        for of, epochs in lengths.items()
        if rows is not None and epochs is not None
    }
    if train.steps is not None:
        steps["run"] = train.steps
    price = None if machine is None else machine.price
    found = []
    for of, count in steps.items():
        seconds = count * trial.time.step
        money = None if price is None else price * machines * seconds / HOUR
        found.append({"of": of, "steps": count, "seconds": seconds, "money": money})
    return found


def sent(trial: Trial) -> list[Mapping[str, Any]]:
    """What a rank sends in a step, by collective and by the links it goes over, most first."""
    per_machine = trial.run.launch.devices
    found = [
        {
            "operation": one.operation,
            "ranks": len(one.group),
            "link": "machines" if one.spans(per_machine) else "cards",
            "times": round(one.times),
            "bytes": round(one.bytes),
            "sent": round(one.wire),
        }
        for one in trial.memory.work.traffic
    ]
    return sorted(found, key=lambda one: -int(one["sent"]))
