"""The answers of ``anygauge plan``: how they are found, and shown as text and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from anygauge.cli import plan_time
from anygauge.cli.console import Console
from anygauge.cli.lines import seconds
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, UsageError
from anygauge.planning.candidates import layouts, section_in_words
from anygauge.planning.changes import Fitting, Largest, largest_batch, largest_sequence
from anygauge.planning.fit import GIB
from anygauge.planning.memory import KINDS, Peak
from anygauge.planning.trials import Target, Trial, Trials, Try, changed
from anygauge.training.strategy import share_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One of several ways: on another machine, or with another strategy.

    Attributes:
        name: the machine, or the strategy.
        card: "" where none is known.
        ranks: of the run.
        trial: None where the run is refused.
        refused: why.
    """

    name: str
    card: str
    ranks: int
    trial: Trial | None
    refused: str = ""


@dataclass(kw_only=True, slots=True)
class PlanAnswers:
    """What was asked for; None: it was not.

    Attributes:
        rows: of the training data.
        changes: with which the run fits.
        machines, strategies: what the run takes there.
        scaling: the run on 1 to several machines, with as many rows a step on each.
        largest: what was looked for, and what was found.
    """

    trial: Trial
    target: Target
    rows: int | None = None
    changes: Sequence[Fitting] | None = None
    machines: Sequence[PlanRow] | None = None
    strategies: Sequence[PlanRow] | None = None
    scaling: Sequence[PlanRow] | None = None
    largest: tuple[str, Largest] | None = None


# -- finding ---------------------------------------------------------------------------------------


def check_wanted(target: Target, *, suggest: bool, largest: bool) -> None:
    """Raises: UsageError: nothing is known to hold a run against."""
    if not (suggest or largest) or (target.card is not None and target.card.memory is not None):
        return
    option = "--suggest" if suggest else "--largest"
    known = "no card was found here" if target.card is None else no_memory(target)
    raise UsageError(f"{option}: {known}; name a machine whose memory is known (--machine h100:8)")


def no_memory(target: Target) -> str:
    """Said of a card whose memory is not described."""
    assert target.card is not None
    return (
        f"the description of {target.card.name} ({target.card.origin}) does not say how much "
        "memory it has. Add it in a file of your own (--hardware FILE.toml): "
        f'[card.{target.card.name}] memory = "80 GiB"'
    )


def find_largest(run: RunFile, target: Target, trials: Trials, what: str) -> tuple[str, Largest]:
    """The largest ``batch`` or ``sequence``."""
    if what == "sequence":
        return what, largest_sequence(run, target, trials)
    share = share_of(run, trials.registry, 0, run.launch.nodes * run.launch.devices)
    return what, largest_batch(run, target, trials, share.count)


def try_strategies(run: RunFile, target: Target, trials: Trials) -> Sequence[PlanRow]:
    """Every layout that a number of ranks can have: those that fit first, the fastest first."""
    ranks = run.launch.nodes * run.launch.devices
    rows = []
    for section in layouts(trials.registry, ranks, run.launch.devices):
        name = section_in_words(section)
        try:
            rows.append(row(changed(run, {"strategy": section}), target, trials, name))
        except AnygaugeError as error:
            rows.append(PlanRow(name=name, card="", ranks=ranks, trial=None, refused=str(error)))
    return sorted(rows, key=_order)


def _order(row: PlanRow) -> tuple[bool, bool, float]:
    """Without a time, by what is needed."""
    trial = row.trial
    if trial is None:
        return True, True, 0
    needed = trial.memory.worst[1].total if trial.fit is None else trial.fit.needed
    slow = needed if trial.time is None else trial.time.step
    return False, trial.fit is not None and not trial.fit.fits, slow


def scaled(run: RunFile, target: Target, trials: Try, most: int) -> Sequence[PlanRow]:
    """The run on 1 to so many machines, each with as many rows a step."""
    found = []
    for count in plan_time.machines_up_to(most):
        rows = run.train.global_batch_size * count // run.launch.nodes
        lines = {"launch.nodes": count, "train.global_batch_size": rows}
        found.append(row(changed(run, lines), target, trials, str(count)))
    return found


def row(run: RunFile, target: Target, trials: Try, name: str) -> PlanRow:
    """A run somewhere; a refusal is an answer."""
    ranks = run.launch.nodes * run.launch.devices
    card = "" if target.card is None else target.card.name
    try:
        return PlanRow(name=name, card=card, ranks=ranks, trial=trials(run, target))
    except AnygaugeError as error:
        return PlanRow(name=name, card=card, ranks=ranks, trial=None, refused=str(error))


def name_of(target: Target) -> str:
    """What a machine is called."""
    return "this machine" if target.machine is None else target.machine.name


# -- JSON ------------------------------------------------------------------------------------------


def record(answers: PlanAnswers) -> dict[str, Any]:
    """All of it for programs; every key is always there (docs/planning.md has them)."""
    found, run, fit = answers.trial.memory, answers.trial.run, answers.trial.fit
    target, largest = answers.target, answers.largest
    return {
        "fits": None if fit is None else fit.fits,
        "nodes": run.launch.nodes,
        "devices": run.launch.devices,
        "ranks": run.launch.nodes * run.launch.devices,
        "backend": target.backend,
        "machine": None if target.machine is None else target.machine.name,
        "card": None if target.card is None else target.card.name,
        "strategy": found.strategy,
        "precision": asdict(found.precision),
        "parameters": found.numbers[0],
        "trained_parameters": found.numbers[1],
        "rehearsed": found.how,
        "time": None if answers.trial.time is None else answers.trial.time.record(),
        "untimed": answers.trial.untimed or None,
        "traffic": plan_time.sent(answers.trial),
        "wholes": [
            asdict(one)
            for one in plan_time.total_times(answers.trial, target.machine, answers.rows)
        ],
        "activations_per_layer": found.per_layer,
        "device": {phase: _peak(peak) for phase, peak in found.device.items()},
        "host": {phase: _peak(peak) for phase, peak in found.host.items()},
        "fit": None if fit is None else fit.record(),
        "changes": None if answers.changes is None else [_change(c) for c in answers.changes],
        "machines": _rows(answers.machines),
        "strategies": _rows(answers.strategies),
        "scaling": _rows(answers.scaling),
        "largest": None if largest is None else _largest(*largest),
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {"total": peak.total, "kinds": dict(peak.kinds), "parts": list(peak.parts)}


def _change(fitting: Fitting) -> dict[str, Any]:
    change, fit = fitting.change, fitting.trial.fit
    assert fit is not None
    return {
        "lines": dict(change.lines),
        "set": change.options,
        "yaml": change.text,
        "costs": change.costs,
        "needed": fit.needed,
        "left": fit.left,
    }


def _rows(rows: Sequence[PlanRow] | None) -> list[dict[str, Any]] | None:
    return None if rows is None else [_row(one) for one in rows]


def _row(row: PlanRow) -> dict[str, Any]:
    trial = row.trial
    phase, peak = (None, None) if trial is None else trial.memory.worst
    fit, time = (None, None) if trial is None else (trial.fit, trial.time)
    return {
        "name": row.name,
        "card": row.card or None,
        "ranks": row.ranks,
        "tensors": None if peak is None else peak.total,
        "phase": phase,
        "fit": None if fit is None else fit.record(),
        "time": None if time is None else time.record(),
        "refused": row.refused or None,
    }


def _largest(what: str, found: Largest) -> dict[str, Any]:
    trial = found.trial
    fit = None if trial is None else trial.fit
    return {
        "of": what,
        "lines": None if found.change is None else dict(found.change.lines),
        "needed": None if fit is None else fit.needed,
        "left": None if fit is None else fit.left,
        "beyond": None if found.beyond is None else dict(found.beyond.lines),
        "refused": found.refused or None,
    }


# -- text ------------------------------------------------------------------------------------------

SMALL = 0.001
"""Kinds of a smaller part of the largest phase have no column."""
COLUMNS: Sequence[tuple[str, Callable[[Trial], str]]] = (
    ("fits", lambda trial: "?" if trial.fit is None else "yes" if trial.fit.fits else "no"),
    ("needed, GiB", lambda trial: "?" if trial.fit is None else _gib(trial.fit.needed)),
    ("left, GiB", lambda trial: "?" if trial.fit is None else _gib(trial.fit.left)),
    ("phase", lambda trial: trial.memory.worst[0]),
    ("step", lambda trial: "?" if trial.time is None else seconds(trial.time.step)),
    ("tokens/s", lambda trial: "?" if trial.time is None else f"{trial.time.tokens_per_s:,.0f}"),
)
"""Of the tables of machines and strategies, behind their names."""
NUMBERS = ("GiB", "tokens/s", "step")


class Shown:
    """Prints each answer when it is there, the verdict first.

    Args:
        quiet: print nothing: JSON follows.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet)

    def trial(self, trial: Trial, target: Target) -> None:
        """The verdict, and what each phase takes."""
        found, fit = trial.memory, trial.fit
        self._line(verdict(trial, target), "bold")
        total, trained = found.numbers
        ranks = trial.run.launch.nodes * trial.run.launch.devices
        self._line(
            f"{total:,} parameters, {trained:,} trained; {found.precision.param_dtype}; "
            f"{found.strategy}; {ranks} rank{'s' if ranks > 1 else ''}; rehearsed: {found.how}"
        )
        if target.card is not None and not target.card.backend:
            card, backend = target.card.name, target.backend
            self._line(f"No backend here drives {card}; planned with {backend} instead")
        if found.per_layer is not None:
            self._line(
                f"Activations: {found.per_layer / 2**20:,.1f} MiB of each layer for a micro-batch"
            )
        largest: dict[str, int] = {}
        for peak in found.device.values():
            for kind, size in peak.kinds.items():
                largest[kind] = max(size, largest.get(kind, 0))
        seen = {kind for kind, size in largest.items() if size > SMALL * found.worst[1].total}
        kinds = [kind for kind in dict.fromkeys([*KINDS, *largest]) if kind in seen]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("GiB")
        for phase in found.device:
            table.add_column(phase, justify="right")
        rows = {kind: [peak.kinds.get(kind, 0) for peak in found.device.values()] for kind in kinds}
        totals = [peak.total for peak in found.device.values()]
        if fit is None:
            rows["most at once"] = totals
        else:
            needed = [fit.phases[phase] for phase in found.device]
            rows["on top"] = [a - b for a, b in zip(needed, totals, strict=True)]
            rows |= {"needed": needed, "left": [fit.memory - one for one in needed]}
        for heading, sizes in rows.items():
            table.add_row(heading, *map(_gib, sizes))
        self._console.print(table)

    def rows(self, what: str, rows: Sequence[PlanRow]) -> None:
        """Machines or strategies."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(what, min_width=max(len(w) for one in rows for w in one.name.split()))
        table.add_column("ranks", justify="right")
        for heading, _ in COLUMNS:
            table.add_column(heading, justify="right" if heading.endswith(NUMBERS) else "left")
        for one in rows:
            if one.trial is not None:
                values = (value(one.trial) for _, value in COLUMNS)
                table.add_row(one.name, str(one.ranks), *values)
        self._console.print(table)
        for one in rows:
            if one.trial is None:
                self._line(f"refused: {one.name}: {one.refused}", "dim")

    def lines(self, *lines: str) -> None:
        """Plain ones."""
        for line in lines:
            self._line(line)

    def changes(self, changes: Sequence[Fitting]) -> None:
        """Lines to paste."""
        if not changes:
            self._line(
                "None of the changes that were tried fits: use cards with more memory (--compare "
                "shows several), or a smaller model"
            )
            return
        self._line("Changes that fit, cheapest first:", "bold")
        for number, fitting in enumerate(changes, 1):
            fit, change = fitting.trial.fit, fitting.change
            assert fit is not None
            needs = f"needs {_gib(fit.needed)} GiB, {_gib(fit.left)} stay free"
            self._line(f"{number}. {needs}: {change.costs}")
            for line in change.text.splitlines():
                self._line(f"     {line}", "green")
            options = " ".join(f"--set {shlex.quote(one)}" for one in change.options)
            self._line(f"     {options}", "dim", soft_wrap=True)

    def _line(self, text: str, style: str = "", soft_wrap: bool | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=soft_wrap)


def verdict(trial: Trial, target: Target) -> str:
    """One line: whether a run fits, what it needs, and what is left or missing."""
    if target.card is None:
        return "Not compared with a device's memory: name a machine (--machine h100:8)"
    fit = trial.fit
    if fit is None:
        return f"No verdict: {no_memory(target)}"
    card = target.card.name
    has = f"each {card} needs {_gib(fit.needed)} of {_gib(fit.memory)} GiB ({fit.phase})"
    for name, (needed, there) in fit.shared.items():
        of = "" if there is None else f" of {_gib(there)}"
        has += f"; {name} of a machine: {_gib(needed)}{of} GiB"
    if fit.fits:
        return f"Fits: {has}; {_gib(fit.left)} GiB of {card} stay free"
    missing = (f"{_gib(n)} GiB of {card if k == 'memory' else k}" for k, n in fit.lacking.items())
    return f"Does not fit: {has}; missing: {', '.join(missing)}"


def words_of_largest(what: str, found: Largest) -> str:
    """One line: the largest batch or sequence that fits."""
    if found.change is None or found.trial is None or found.trial.fit is None:
        why = f": {found.refused}" if found.refused else ""
        return f"Largest {what}: not even the smallest fits{why}"
    lines = ", ".join(f"{path}: {value:,}" for path, value in found.change.lines.items())
    fit = found.trial.fit
    said = f"Largest {what}: {lines}; needs {_gib(fit.needed)} GiB, {_gib(fit.left)} stay free"
    return f"{said}. The next is refused: {found.refused}" if found.refused else said


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
