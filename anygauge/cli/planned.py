"""What ``anygauge plan`` prints, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Column, Table

from anygauge.cli.console import Console
from anygauge.cli.lines import seconds
from anygauge.interface.strategy import KINDS
from anygauge.planning.changes import ChangedTrial, Largest, PlanRow, ranks_of, sent, total_times
from anygauge.planning.fit import GIB, SLACK
from anygauge.planning.trials import Target, Trial

ASKED = ("largest", "changes", "machines", "strategies")
"""Keys of the JSON that not every plan has."""
OF_MEMORY = ("strategy", "precision", "kernels", "device", "host", "uncompiled")
"""Keys of the JSON that are fields of `RunMemory`."""
SMALL = 0.001
"""Kinds of a smaller part of the largest phase have no line."""
LEAST = 10**7
"""Bytes: what is sent of less is left to JSON."""
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

    def trial(self, trial: Trial, target: Target, rows: int | None, notes: Sequence[str]) -> None:
        """The verdict, what each phase takes, and how long a step does.

        Args:
            rows: of the training data; None: not known.
            notes: on machines.
        """
        found, fit, time, launch = trial.memory, trial.fit, trial.time, trial.run.launch
        wholes, plain = total_times(trial, target.machine, rows), asdict(found)
        self.record = {
            "fits": None if fit is None else fit.fits,
            "nodes": launch.nodes,
            "devices": launch.devices,
            "ranks": ranks_of(trial.run),
            "backend": target.backend,
            "machine": target.machine and target.machine.name,
            "card": target.card and target.card.name,
            "notes": list(notes),
            "parameters": found.numbers[0],
            "trained_parameters": found.numbers[1],
            "time": None if time is None else time.record(),
            "untimed": trial.untimed or None,
            "traffic": sent(trial),
            "wholes": wholes,
            "activations_per_layer": found.per_layer,
            "compiled": found.compiled or None,
            "fit": None if fit is None else fit.record(),
            **{name: plain[name] for name in OF_MEMORY},
            **dict.fromkeys(ASKED),
        }
        self._print(verdict(trial, target), style="bold")
        for line in (*_about(trial, target), *notes):
            self._print(line)
        self._phases(trial)
        for line in _time(trial, target):
            self._print(line)
        for one in wholes:
            money = "" if one["money"] is None else f", cost {one['money']:,.2f}"
            took = seconds(one["seconds"])
            self._print(f"  the {one['of']}: {one['steps']:,} steps, {took}{money}")

    def largest(self, batch: Largest, rows: Largest) -> None:
        """What fits at the most."""
        self.record["largest"] = {"batch": batch.record(), "rows": rows.record()}
        for what, found in (("Largest micro-batch", batch), ("Longest rows", rows)):
            said = "none fits"
            if found.change is not None and found.trial is not None and found.trial.fit is not None:
                said = ", ".join(f"{path}: {value:,}" for path, value in found.change.lines.items())
                why = f"; {found.ended_by}" if found.ended_by else ""
                said += f" (needs {_gib(found.trial.fit.needed)} GiB{why})"
            self._print(f"{what} on this card: {said}")

    def rows(self, what: str, key: str, rows: Sequence[PlanRow]) -> None:
        """Machines or strategies."""
        self.record[key] = [one.record() for one in rows]
        names = Column(what, min_width=max(len(word) for one in rows for word in one.name.split()))
        headings = ("needed, GiB", "left, GiB", "phase", "step", "tokens/s")
        others = (Column(one, justify="left" if one == "phase" else "right") for one in headings)
        table = Table(
            names,
            Column("ranks", justify="right"),
            "fits",
            *others,
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for one in rows:
            if one.trial is not None:
                table.add_row(one.name, str(one.ranks), *_cells(one.trial))
        self._print(table)
        for one in rows:
            if one.trial is None:
                self._print(f"refused: {one.name}: {one.refused}", style="dim")

    def changes(self, changes: Iterator[ChangedTrial]) -> None:
        """What to change, with lines to paste."""
        record = self.record["changes"] = []
        for number, found in enumerate(changes, 1):
            record.append(found.record())
            if number == 1:
                self._print("What to change, cheapest first:", style="bold")
            said, needed = record[-1], _gib(record[-1]["needed"])
            fits = "fits" if said["fits"] else "does not fit"
            takes = "" if said["step"] is None else f", a step {seconds(said['step'])}"
            several = "together, " if found.together else ""
            self._print(f"{number}. {several}{fits}: needs {needed} GiB{takes}: {said['costs']}")
            for line in said["yaml"].splitlines():
                self._print(f"     {line}", style="green")
            options = " ".join(f"--set {shlex.quote(one)}" for one in said["set"])
            self._print(f"     {options}", style="dim", soft_wrap=True)
        if not any(one["fits"] for one in record):
            self._print(
                "Nothing that was tried makes it fit: use more cards, or cards with more memory "
                "(--compare shows several), or a smaller model"
            )

    def _phases(self, trial: Trial) -> None:
        device, fit = trial.memory.device, trial.fit
        lines = {
            kind: [peak.kinds.get(kind, 0) for peak in device.values()]
            for kind in dict.fromkeys(
                [*KINDS, *(k for peak in device.values() for k in peak.kinds)]
            )
        }
        least = SMALL * trial.memory.worst[1].total
        lines = {kind: sizes for kind, sizes in lines.items() if max(sizes) > least}
        totals = [peak.total for peak in device.values()]
        if fit is None:
            lines["tensors"] = totals
        else:
            needed = [fit.phases[phase] for phase in device]
            lines["on top"] = [a - b for a, b in zip(needed, totals, strict=True)]
            lines |= {"needed": needed, "left": [fit.memory - one for one in needed]}
        phases = [Column(phase, justify="right", min_width=len(phase)) for phase in device]
        table = Table(Column("GiB"), *phases, box=box.SIMPLE_HEAD, pad_edge=False)
        for heading, sizes in lines.items():
            table.add_row(heading, *map(_gib, sizes))
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
    found, (total, trained), ranks = trial.memory, trial.memory.numbers, ranks_of(trial.run)
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
    time, ranks = trial.time, ranks_of(trial.run)
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
    for one in sent(trial):
        if one["sent"] >= LEAST:
            where = "between machines" if one["link"] == "machines" else "in a machine"
            yield (
                f"  each rank sends {one['sent'] / 1e9:,.2f} GB {where}: {one['operation']} of "
                f"{one['ranks']} ranks, {one['times']:,} times"
            )


def _cells(trial: Trial) -> Iterator[str]:
    fit, time = trial.fit, trial.time
    yield "?" if fit is None else "yes" if fit.fits else "no"
    yield "?" if fit is None else _gib(fit.needed)
    yield "?" if fit is None else _gib(fit.left)
    yield trial.memory.worst[0]
    yield "?" if time is None else seconds(time.step)
    yield "?" if time is None else f"{time.tokens_per_s:,.0f}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
