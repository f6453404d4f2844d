"""``anygauge plan --calibrate``: what this machine's cards reach, measured and stored."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import typer

from anygauge.cli.shared_options import choose_backend
from anygauge.interface import Card, UsageError
from anygauge.planning.machines import Hardware, measured_file
from anygauge.registry import Registry
from anygauge.util.console import Console, make_table
from anygauge.util.files import write_text

HOST_RANKS, PEERS = 2, 8
"""Ranks at most: those that share a host which is their device, and others."""


def calibrate(backend: str | None, devices: int | None, *, as_json: bool) -> None:
    """Measure, store, and say what and where.

    Args:
        backend: None: the one that ``auto`` chooses.
        devices: ranks; None: one for each card. Where the host is the card, one rank is measured
            as well.

    Raises:
        UsageError: the cards are not all of one kind, or the file cannot be written.
        AnygaugeError: the ranks failed.
    """
    from anygauge.launch.calibration import measure

    _make_room()
    registry, selection, chosen = choose_backend(backend)
    card = _machine_card(registry, chosen.name, selection.probe.cards)
    most = HOST_RANKS if card.shared_memory else PEERS
    ranks = devices or max(1, min(chosen.placement.device_count(), most))
    found = {}
    for count in sorted({1, ranks}) if card.shared_memory else [ranks]:
        with Console(stderr=True, quiet=as_json).status(f"measuring {_ranks(count)}"):
            found[count] = measure(chosen.name, count)
    file = write_measured(card, found, f"measured on this machine, {date.today()}")
    if as_json:
        figures = {"ranks": ranks, "file": str(file), "measured": found}
        typer.echo(json.dumps({"card": card.name, **figures}))
        return
    each = "each rank" if card.shared_memory else f"each {card.name}"
    columns = [_shown_figures(figures) for figures in found.values()]
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in columns[-1]]
    console = Console()
    console.print(make_table([(each, *map(_ranks, found)), *rows]))
    console.print(f"Written to {file}; plans now use these figures")
    if ranks == 1:
        console.print("Only one card was measured, so the speed between cards is not known")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _machine_card(registry: Registry, backend: str, names: tuple[str, ...]) -> Card:
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


def _make_room() -> None:
    """Make the file's folder, before anything is measured.

    Raises:
        UsageError: it cannot be written.
    """
    folder = measured_file().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"what is measured is kept in {folder}, which cannot be written: {error.strerror}. "
            "Name another folder of configurations: XDG_CONFIG_HOME=FOLDER"
        ) from None


def write_measured(card: Card, found: Mapping[int, Mapping[str, Any]], how: str) -> Path:
    """Write a card's figures, in place of what was there.

    Args:
        found: ranks -> figures, as `anygauge.launch.calibration` finds them; of one number of
            ranks where each has a card of its own.
        how: the source of each figure.
    """
    toml = partial(json.dumps, ensure_ascii=False)  # JSON's texts, and lists of them, are TOML's
    lines = [f"# Written by `anygauge plan --calibrate`: {how}", f'[card."{card.name}"]']
    if not card.sources:  # nobody describes it
        lines += [f"names = {toml(card.names)}", f"backend = {toml(card.backend)}"]
    for ranks, figures in found.items():
        if card.shared_memory:
            lines.append(f'[card."{card.name}".ranks.{ranks}]')
        shown = _shown_figures(figures).items()
        lines += [f"{name} = {toml([value, f'{how}, {_ranks(ranks)}'])}" for name, value in shown]
    write_text(measured_file(), "\n".join(lines) + "\n")
    return measured_file()


def _shown_figures(figures: Mapping[str, Any]) -> dict[str, str]:
    """Figure -> number and unit."""
    rates = figures.get("matmul", {}).items()
    shown = {f"matmul.{kind}": f"{rate / 1e9:.1f} GFLOPS" for kind, rate in rates}
    shown |= {n: f"{figures[n] / 1e9:.2f} GB/s" for n in ("copy", "exchange") if n in figures}
    return shown | {n: f"{figures[n] * 1e6:.2f} us" for n in ("call",) if n in figures}
