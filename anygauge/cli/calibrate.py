"""``anygauge plan --calibrate``: what this machine's cards reach, measured and stored."""

from __future__ import annotations

import json
from datetime import date

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from anygauge.interface import Backend, Card, UsageError
from anygauge.registry import AUTO, Hardware, Registry, select_backend
from anygauge.registry.measured import make_room, shown, write_measured

HOST_RANKS = 2
"""Ranks that share a host that is their device, where it has so many processors."""
PEERS = 8
"""Ranks at most."""


def calibrate(backend: str | None, devices: int | None, *, as_json: bool) -> None:
    """Measure, store, and say what and where.

    Args:
        backend: None: the one that ``auto`` chooses.
        devices: ranks; None: one for each card.

    Raises:
        UsageError: the cards are not all of one kind.
        AnygaugeError: the ranks failed.
    """
    from anygauge.planning.calibration import measure

    make_room()
    registry = Registry.load()
    selection = select_backend(registry, backend or AUTO)
    chosen = registry.create_backend(selection.spec.name)
    card = _card(registry, chosen.name, selection.probe.cards)
    ranks = devices or _ranks(chosen, card)
    figures = measure(chosen.name, {}, ranks)
    if card.shared_memory:
        # What all of them have together, which ranks of a run divide.
        figures["matmul"] = {kind: ranks * rate for kind, rate in figures["matmul"].items()}
        figures |= {name: ranks * figures[name] for name in ("copy", "exchange") if name in figures}
    how = f"measured on this machine, {ranks} rank{'s' if ranks > 1 else ''}, {date.today()}"
    file = write_measured(card, figures, how)
    if as_json:
        typer.echo(json.dumps({"card": card.name, "ranks": ranks, "file": str(file), **figures}))
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(card.name)
    table.add_column("measured", justify="right")
    for name, value in shown(figures):
        table.add_row(name, value)
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"Written to {file}; plans take these figures from now on", markup=False)
    if ranks == 1:
        console.print("One card alone: nothing is known of what cards send each other")


def _card(registry: Registry, backend: str, names: tuple[str, ...]) -> Card:
    """The card that this machine has; one that nobody describes gets a name."""
    if len(names) > 1:
        raise UsageError(
            f"this machine has cards of several kinds ({', '.join(names)}), which one figure "
            "cannot tell; show one kind to the process by the device's own variable, and "
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
