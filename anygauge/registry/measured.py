"""The user's file of what ``anygauge plan --calibrate`` measured on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import MEASURED_BY_TYPE, Card, UsageError, read_hardware
from anygauge.util.files import write_text

_UNITS = {"feed": "GB/s", "copy": "GB/s", "exchange": "GB/s", "call": "us", "issue": "us"}
_SIZES = {"GB/s": 1e9, "us": 1e-6, "GFLOPS": 1e9}


def measured_file() -> Path:
    """Where it is: in the user's folder of configurations, as XDG has it."""
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "anygauge" / "measured.toml"


def measured_files() -> list[Path]:
    """The file, where there is one.

    Raises:
        UsageError: it cannot be read; says what to do.
    """
    file = measured_file()
    if not file.is_file():
        return []
    try:
        read_hardware(file.read_text(encoding="utf-8"), str(file), sourced=False)
    except (UsageError, OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{error}. Remove the file, or write it anew: anygauge plan --calibrate"
        ) from None
    return [file]


def make_room() -> None:
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
        found: ranks -> figures, as `anygauge.planning.calibration` finds them; of one number of
            ranks where each has a card of its own.
        how: the source of each figure.
    """
    make_room()
    file = measured_file()
    lines = [f"# Written by `anygauge plan --calibrate`: {how}", f'[card."{card.name}"]']
    if card.names and not card.sources:
        lines.append(f"names = {_texts(card.names)}")
    if card.backend and not card.sources:
        lines.append(f"backend = {_text(card.backend)}")
    for ranks, figures in found.items():
        source = f"{how}, {ranks} rank{'s' if ranks > 1 else ''}"
        if card.shared_memory:
            lines.append(f'[card."{card.name}".ranks.{ranks}]')
        lines += [f"{name} = [{_text(value)}, {_text(source)}]" for name, value in shown(figures)]
    write_text(file, "\n".join(lines) + "\n")
    return file


def shown(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Figure -> number and unit."""
    for name in MEASURED_BY_TYPE:
        for kind, rate in figures.get(name, {}).items():
            yield f"{name}.{kind}", f"{rate / 1e9:.1f} GFLOPS"
    for name, unit in _UNITS.items():
        if name in figures:
            yield name, f"{figures[name] / _SIZES[unit]:.2f} {unit}"


def _texts(values: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _text(value: str) -> str:
    """A TOML string."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
