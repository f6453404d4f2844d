"""What ``anygauge plan`` prints, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from anygauge.cli.console import Console
from anygauge.cli.lines import seconds
from anygauge.interface.strategy import KINDS
from anygauge.planning.answers import PlanRow, sent, total_times
from anygauge.planning.changes import ChangedTrial, Largest
from anygauge.planning.fit import GIB, SLACK
from anygauge.planning.time import Duration
from anygauge.planning.trials import Target, Trial

ASKED = ("largest", "changes", "machines", "scaling", "strategies")
"""Keys of the JSON that not every plan has."""
SMALL = 0.001
"""Kinds of a smaller part of the largest phase have no line."""
LEAST = 10**7
"""Bytes: what is sent of less is left to JSON."""


class Page:
    """Prints each answer when it is there, the verdict first.

    Args:
        quiet: print nothing: JSON follows.

    Attributes:
        record: of all of them, for programs; docs/planning.md has the keys.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet)
        self.record: dict[str, Any] = {}

    def trial(self, trial: Trial, target: Target, rows: int | None, notes: Sequence[str]) -> None:
        """The verdict, what each phase takes, and how long a step does.

        Args:
            rows: of the training data; None: not known.
            notes: on machines.
        """
        found, fit, run, ranks = trial.memory, trial.fit, trial.run, _ranks(trial)
        wholes = total_times(trial, target.machine, rows)
        self.record = {
            "fits": None if fit is None else fit.fits,
            "nodes": run.launch.nodes,
            "devices": run.launch.devices,
            "ranks": ranks,
            "backend": target.backend,
            "machine": None if target.machine is None else target.machine.name,
            "notes": list(notes),
            "card": None if target.card is None else target.card.name,
            "strategy": found.strategy,
            "precision": asdict(found.precision),
            "kernels": dict(found.kernels),
            "parameters": found.numbers[0],
            "trained_parameters": found.numbers[1],
            "time": None if trial.time is None else trial.time.record(),
            "untimed": trial.untimed or None,
            "traffic": sent(trial),
            "wholes": [asdict(one) for one in wholes],
            "activations_per_layer": found.per_layer,
            "device": {phase: asdict(peak) for phase, peak in found.device.items()},
            "host": {phase: asdict(peak) for phase, peak in found.host.items()},
            "uncompiled": {phase: asdict(peak) for phase, peak in found.uncompiled.items()},
            "compiled": found.compiled or None,
            "fit": None if fit is None else fit.record(),
            **dict.fromkeys(ASKED),
        }
        self._line(verdict(trial, target), "bold")
        for line in (*_about(trial, target), *notes):
            self._line(line)
        self._phases(trial)
        for line in _time(trial, target):
            self._line(line)
        for one in wholes:
            money = "" if one.money is None else f", cost {one.money:,.2f}"
            self._line(f"  the {one.of}: {one.steps:,} steps, {seconds(one.seconds)}{money}")

    def largest(self, batch: Largest, rows: Largest) -> None:
        """What fits at the most."""
        self.record["largest"] = {"batch": batch.record(), "rows": rows.record()}
        for what, found in (("Largest micro-batch", batch), ("Longest rows", rows)):
            self._line(words_of_largest(what, found))

    def rows(self, what: str, key: str, rows: Sequence[PlanRow]) -> None:
        """Machines or strategies."""
        self.record[key] = [one.record() for one in rows]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(what, min_width=max(len(w) for one in rows for w in one.name.split()))
        for heading in ("ranks", "fits", "needed, GiB", "left, GiB", "phase", "step", "tokens/s"):
            table.add_column(heading, justify="left" if heading in ("fits", "phase") else "right")
        for one in rows:
            if one.trial is not None:
                table.add_row(one.name, str(one.ranks), *_cells(one.trial))
        self._console.print(table)
        for one in rows:
            if one.trial is None:
                self._line(f"refused: {one.name}: {one.refused}", "dim")

    def changes(self, changes: Iterator[ChangedTrial]) -> None:
        """What to change, with lines to paste."""
        record = self.record["changes"] = []
        for number, found in enumerate(changes, 1):
            record.append(found.record())
            if number == 1:
                self._line("What to change, cheapest first:", "bold")
            fit, change = found.trial.fit, found.change
            assert fit is not None
            needs = f"{'fits' if fit.fits else 'does not fit'}: needs {_gib(fit.needed)} GiB"
            takes = "" if found.trial.time is None else f", a step {seconds(found.trial.time.step)}"
            several = "together, " if found.together else ""
            self._line(f"{number}. {several}{needs}{takes}: {change.costs}")
            for line in change.text.splitlines():
                self._line(f"     {line}", "green")
            options = " ".join(f"--set {shlex.quote(one)}" for one in change.options)
            self._line(f"     {options}", "dim", soft_wrap=True)
        if not any(one["fits"] for one in record):
            self._line(
                "Nothing that was tried makes it fit: use more cards, or cards with more memory "
                "(--compare shows several), or a smaller model"
            )

    def _phases(self, trial: Trial) -> None:
        found, fit = trial.memory, trial.fit
        peaks = found.device.values()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("GiB")
        for phase in found.device:
            table.add_column(phase, justify="right", min_width=len(phase))
        least = SMALL * found.worst[1].total
        kinds = dict.fromkeys([*KINDS, *(kind for peak in peaks for kind in peak.kinds)])
        lines = {kind: [peak.kinds.get(kind, 0) for peak in peaks] for kind in kinds}
        lines = {kind: sizes for kind, sizes in lines.items() if max(sizes) > least}
        totals = [peak.total for peak in peaks]
        if fit is None:
            lines["tensors"] = totals
        else:
            needed = [fit.phases[phase] for phase in found.device]
            lines["on top"] = [a - b for a, b in zip(needed, totals, strict=True)]
            lines |= {"needed": needed, "left": [fit.memory - one for one in needed]}
        for heading, sizes in lines.items():
            table.add_row(heading, *map(_gib, sizes))
        self._console.print(table)

    def _line(self, text: str, style: str = "", soft_wrap: bool | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=soft_wrap)


def no_memory(target: Target) -> str:
    """Said of a card whose memory is not described."""
    assert target.card is not None
    return (
        f"the description of {target.card.name} ({target.card.origin}) does not say how much "
        "memory it has. Add it in a file of your own (--hardware FILE.toml): "
        f'[card.{target.card.name}] memory = "80 GiB"'
    )


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


def _about(trial: Trial, target: Target) -> Iterator[str]:
    found, ranks = trial.memory, _ranks(trial)
    total, trained = found.numbers
    yield (
        f"{total:,} parameters, {trained:,} trained; {found.precision.param_dtype}; "
        f"{found.strategy}; {ranks} rank{'s' if ranks > 1 else ''}"
    )
    if found.kernels:
        yield f"Kernels assumed: {', '.join(f'{k} {name}' for k, name in found.kernels.items())}"
    yield f"Activations: {found.per_layer / 2**20:,.1f} MiB of each layer for a micro-batch"
    if trial.fit is not None and found.uncompiled:
        most = max(peak.total for peak in found.uncompiled.values())
        needed = round((1 + SLACK) * most) + trial.fit.context + trial.fit.collectives
        yield f"Without its graph compiler ({found.compiled}): {_gib(needed)} GiB"
    if target.card is not None and not target.card.backend:
        yield f"No backend here drives {target.card.name}; planned with {target.backend} instead"


def _time(trial: Trial, target: Target) -> Iterator[str]:
    time, ranks = trial.time, _ranks(trial)
    if time is None:
        if target.card is not None:
            yield f"Time: not known: {trial.untimed}"
        return
    mfu = "" if time.mfu is None else f"; MFU {time.mfu:.0%}"
    each = f" ({time.tokens_per_s / ranks:,.0f} each)" if ranks > 1 else ""
    yield f"Time: a step {seconds(time.step)}; {time.tokens_per_s:,.0f} tokens/s{each}{mfu}"
    yield f"  {', '.join(_parts(time))}"
    if target.card is not None and target.card.shared_memory:
        yield "  a rough estimate: a processor reaches other rates than those of large products"
    for one in sent(trial):
        if one["sent"] >= LEAST:
            where = "between machines" if one["link"] == "machines" else "in a machine"
            yield (
                f"  each rank sends {one['sent'] / 1e9:,.2f} GB {where}: {one['operation']} of "
                f"{one['ranks']} ranks, {one['times']:,} times"
            )


def _parts(time: Duration) -> Iterator[str]:
    parts = {
        "matrix products": time.multiplying,
        "other operations": time.moving,
        "host": time.issuing,
        "sends in a machine": time.sending["cards"],
        "sends between machines": time.sending["machines"],
        "copies to the host and back": time.copying,
        "operations there": time.on_host,
        "overlapped": -time.hidden,
        "stages wait": time.idle,
    }
    return (f"{name} {seconds(abs(took))}" for name, took in parts.items() if took)


def words_of_largest(what: str, found: Largest) -> str:
    """One line: the largest micro-batch, or the longest rows."""
    if found.change is None or found.trial is None or found.trial.fit is None:
        return f"{what} on this card: none fits"
    lines = ", ".join(f"{path}: {value:,}" for path, value in found.change.lines.items())
    why = f"; {found.ended_by}" if found.ended_by else ""
    return f"{what} on this card: {lines} (needs {_gib(found.trial.fit.needed)} GiB{why})"


def _cells(trial: Trial) -> Iterator[str]:
    fit, time = trial.fit, trial.time
    yield "?" if fit is None else "yes" if fit.fits else "no"
    yield "?" if fit is None else _gib(fit.needed)
    yield "?" if fit is None else _gib(fit.left)
    yield trial.memory.worst[0]
    yield "?" if time is None else seconds(time.step)
    yield "?" if time is None else f"{time.tokens_per_s:,.0f}"


def _ranks(trial: Trial) -> int:
    return trial.run.launch.nodes * trial.run.launch.devices


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
