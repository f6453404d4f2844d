"""``anygauge plan --calibrate``: what this machine's cards reach, measured and stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import typer
from rich import box
from rich.table import Table

from anygauge.cli.console import Console
from anygauge.cli.intent import choose_backend
from anygauge.interface import Backend, Card, UsageError
from anygauge.registry import Hardware, Registry
from anygauge.registry.hardware import make_room, shown_figures, write_measured

HOST_RANKS = 2
"""Ranks at most that share a host that is their device, where it has so many processors."""
PEERS = 8
"""Ranks at most."""


def calibrate(backend: str | None, devices: int | None, *, as_json: bool) -> None:
    """Measure, store, and say what and where.

    Args:
        backend: None: the one that ``auto`` chooses.
        devices: ranks; None: one for each card. Where the host is the card, one rank is measured
            as well.

    Raises:
        UsageError: the cards are not all of one kind.
        AnygaugeError: the ranks failed.
    """
    from anygauge.planning.calibration import measure

    make_room()
    registry, selection, chosen = choose_backend(backend)
    card = _card(registry, chosen.name, selection.probe.cards)
    ranks = devices or _ranks(chosen, card)
    counts = sorted({1, ranks}) if card.shared_memory else [ranks]
    found = {count: _measured(measure, chosen.name, count, as_json) for count in counts}
    file = write_measured(card, found, f"measured on this machine, {date.today()}")
    if as_json:
        figures = {"ranks": ranks, "file": str(file), "measured": found}
        typer.echo(json.dumps({"card": card.name, **figures}))
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"each {card.name}" if not card.shared_memory else "each rank")
    for count in counts:
        table.add_column(f"{count} rank{'s' if count > 1 else ''}", justify="right")
    columns = [shown_figures(found[count]) for count in counts]
    for name in columns[-1]:
        table.add_row(name, *(column.get(name, "-") for column in columns))
    console = Console()
    console.print(table)
    console.print(f"Written to {file}; plans now use these figures")
    if ranks == 1:
        console.print("Only one card was measured, so the speed between cards is not known")


def _measured(
    measure: Callable[[str, Mapping[str, Any], int], dict[str, Any]],
    backend: str,
    ranks: int,
    quiet: bool,
) -> dict[str, Any]:
    """What so many ranks found; a watching user sees progress."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal or console.is_dumb_terminal:
        return measure(backend, {}, ranks)
    with console.status(f"measuring {ranks} rank{'s' if ranks > 1 else ''}"):
        return measure(backend, {}, ranks)


def _card(registry: Registry, backend: str, names: tuple[str, ...]) -> Card:
    """The card that this machine has; one that nobody describes gets a name."""
    if len(names) > 1:
        raise UsageError(
            f"this machine has cards of several kinds ({', '.join(names)}), and one figure cannot "
            "describe them all. Make only one kind visible with the device's own variable, and "
            "measure again"
        )
    known = Hardware.load(registry).of_devices(names)
    if known is not None:
        return known
    name = names[0] if names else backend
    plain = "".join(one if one.isalnum() else "-" for one in name.lower()).strip("-")
    return Card(name=plain, names=names, backend=backend)


def _ranks(backend: Backend, card: Card) -> int:
    count = backend.placement.device_count()
    return max(1, min(count, HOST_RANKS if card.shared_memory else PEERS))
