"""What ``anygauge plan`` prints, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from anygauge.cli.console import Console
from anygauge.cli.lines import seconds
from anygauge.interface.strategy import KINDS
from anygauge.planning.changes import Choice
from anygauge.planning.fit import GIB
from anygauge.planning.trials import Target, Trial

ASKED = ("largest", "changes", "machines", "strategies")
"""Keys of the JSON that not every plan has."""
SMALL = 0.001
"""Kinds of a smaller part of the largest phase have no line."""
PARTS = {
    "multiplying": "matrix products",
    "moving": "other operations",
    "issuing": "host",
    "cards": "sends in a machine",
    "machines": "sends between machines",
    "copying": "copies to the host and back",
    "on_host": "operations there",
    "hidden": "overlapped",
    "idle": "stages wait",
}
"""Fields of `Duration`, and what is printed of them."""


class Page:
    """Prints each answer when it is there, the verdict first.

    Args:
        quiet: print nothing: JSON follows.

    Attributes:
        record: of all of them, for programs; docs/planning.md has the keys.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._print = Console(quiet=quiet).print
        self.record: dict[str, Any] = {}

    def trial(self, trial: Trial, target: Target, notes: Sequence[str]) -> None:
        """The verdict, notes on machines, what each phase takes, and how long a step does."""
        memory = asdict(trial.memory)
        del memory["work"]
        self.record = {
            **trial.record(),
            "fits": None if trial.fit is None else trial.fit.fits,
            "backend": target.backend,
            "machine": target.machine and target.machine.name,
            "card": target.card and target.card.name,
            "notes": list(notes),
            "untimed": trial.untimed or None,
            **memory,
            **dict.fromkeys(ASKED),
        }
        self._print(verdict(trial, target), style="bold")
        for line in (*_about(trial, target), *notes):
            self._print(line)
        self._table(_phases(trial))
        for line in _time(trial, target):
            self._print(line)

    def largest(self, batch: Choice, rows: Choice) -> None:
        """What fits at the most."""
        self.record["largest"] = {one.name: one.record() for one in (batch, rows)}
        for what, found in (("Largest micro-batch", batch), ("Longest rows", rows)):
            said = "none fits"
            if found.trial is not None and found.trial.fit is not None:
                said = ", ".join(f"{path}: {value:,}" for path, value in found.lines.items())
                why = f"; {found.why}" if found.why else ""
                said += f" (needs {_gib(found.trial.fit.needed)} GiB{why})"
            self._print(f"{what} on this card: {said}")

    def rows(self, what: str, key: str, rows: Sequence[Choice]) -> None:
        """Machines or strategies."""
        self.record[key] = [one.record() for one in rows]
        headings = (what, "ranks", "fits", "needed, GiB", "left, GiB", "phase", "step", "tokens/s")
        self._table([headings, *(_cells(one.name, one.trial) for one in rows if one.trial)])
        for one in rows:
            if one.trial is None:
                self._print(f"refused: {one.name}: {one.why}", style="dim")

    def changes(self, changes: Iterable[Choice]) -> None:
        """What to change, with options to paste."""
        record = self.record["changes"] = []
        for number, found in enumerate(changes, 1):
            record.append(found.record())
            if number == 1:
                self._print("What to change, cheapest first:", style="bold")
            fit, time = record[-1]["fit"], record[-1]["time"]
            fits = "fits" if fit["fits"] else "does not fit"
            takes = "" if time is None else f", a step {seconds(time['step'])}"
            self._print(f"{number}. {fits}: needs {_gib(fit['needed'])} GiB{takes}: {found.name}")
            options = " ".join(f"--set {shlex.quote(one)}" for one in found.options)
            self._print(f"     {options}", style="green", soft_wrap=True)
        if not any(one["fit"]["fits"] for one in record):
            self._print(
                "No single change that was tried makes it fit: pass several, or use more cards, or "
                "cards with more memory (--compare shows several), or a smaller model"
            )

    def _table(self, rows: Sequence[Sequence[str]]) -> None:
        """Headings first; no word is cut."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, cells in enumerate(zip(*rows, strict=True)):
            width = max(len(word) for cell in cells for word in cell.split())
            table.add_column(cells[0], justify="right" if number else "left", min_width=width)
        for row in rows[1:]:
            table.add_row(*row)
        self._print(table)


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
    fit, card = trial.fit, target.card
    if card is None:
        return "Not compared with a device's memory: name a machine (--machine h100:8)"
    if fit is None:
        return f"No verdict: {no_memory(target)}"
    has = f"each {card.name} needs {_gib(fit.needed)} of {_gib(fit.memory)} GiB ({fit.phase})"
    for name, (needed, there) in fit.shared.items():
        of = "" if there is None else f" of {_gib(there)}"
        has += f"; {name} of a machine: {_gib(needed)}{of} GiB"
    if fit.fits:
        return f"Fits: {has}; {_gib(fit.left)} GiB of {card.name} stay free"
    missing = (
        f"{_gib(size)} GiB of {card.name if what == 'memory' else what}"
        for what, size in fit.lacking.items()
    )
    return f"Does not fit: {has}; missing: {', '.join(missing)}"


def _about(trial: Trial, target: Target) -> Iterator[str]:
    found, (total, trained), ranks = trial.memory, trial.memory.numbers, trial.ranks
    yield (
        f"{total:,} parameters, {trained:,} trained; {found.precision.param_dtype}; "
        f"{found.strategy}; {ranks} rank{'s' if ranks > 1 else ''}"
    )
    if found.kernels:
        yield f"Kernels assumed: {', '.join(f'{k} {name}' for k, name in found.kernels.items())}"
    yield f"Activations: {found.per_layer / 2**20:,.1f} MiB of each layer for a micro-batch"
    if trial.fit is not None and found.uncompiled:
        most = max(peak.total for peak in found.uncompiled.values())
        needed = _gib(trial.fit.with_margins(most))
        yield f"Without its graph compiler ({found.compiled}): {needed} GiB"
    if target.card is not None and not target.card.backend:
        yield f"No backend here drives {target.card.name}; planned with {target.backend} instead"


def _phases(trial: Trial) -> list[Sequence[str]]:
    device, fit = trial.memory.device, trial.fit
    kinds = dict.fromkeys([*KINDS, *(kind for peak in device.values() for kind in peak.kinds)])
    lines = {kind: [peak.kinds.get(kind, 0) for peak in device.values()] for kind in kinds}
    least = SMALL * trial.memory.worst[1].total
    lines = {kind: sizes for kind, sizes in lines.items() if max(sizes) > least}
    totals = [peak.total for peak in device.values()]
    if fit is None:
        lines["tensors"] = totals
    else:
        needed = [fit.phases[phase] for phase in device]
        lines["on top"] = [a - b for a, b in zip(needed, totals, strict=True)]
        lines |= {"needed": needed, "left": [fit.memory - one for one in needed]}
    return [("GiB", *device), *((name, *map(_gib, sizes)) for name, sizes in lines.items())]


def _time(trial: Trial, target: Target) -> Iterator[str]:
    time, ranks = trial.time, trial.ranks
    if time is None:
        if target.card is not None:
            yield f"Time: not known: {trial.untimed}"
        return
    mfu = "" if time.mfu is None else f"; MFU {time.mfu:.0%}"
    each = f" ({time.tokens_per_s / ranks:,.0f} each)" if ranks > 1 else ""
    yield f"Time: a step {seconds(time.step)}; {time.tokens_per_s:,.0f} tokens/s{each}{mfu}"
    took = {**asdict(time), **time.sending}
    yield "  " + ", ".join(f"{said} {seconds(took[n])}" for n, said in PARTS.items() if took[n])
    if target.card is not None and target.card.shared_memory:
        yield "  a rough estimate: a processor reaches other rates than those of large products"
    if (steps := trial.run.train.steps) is not None:
        yield f"  the run: {steps:,} steps, {seconds(steps * time.step)}"


def _cells(name: str, trial: Trial) -> Sequence[str]:
    fit, time = trial.fit, trial.time
    of_fit = ("?", "?", "?")
    if fit is not None:
        of_fit = "yes" if fit.fits else "no", _gib(fit.needed), _gib(fit.left)
    of_time = ("?", "?") if time is None else (seconds(time.step), f"{time.tokens_per_s:,.0f}")
    return name, str(trial.ranks), *of_fit, trial.memory.worst[0], *of_time


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
