"""What there is of the simulated cards: the compiled part, and those that are asked for."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from anygauge.interface import Finding, Probe
from anygauge_sim import settings


def probe() -> Probe:
    """Look for the compiled part beside this file, and at the settings; imports no torch."""
    folder = Path(__file__).parent
    built = [folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in built if path.is_file()), None)
    devices, count = _cards()
    return Probe(
        devices=devices,
        driver=Finding.not_needed("cards are simulated on the host"),
        software=Finding.yes(
            "the C++ part is built" if count is None else f"{count} simulated cards", str(found)
        )
        if found
        else Finding.no(
            "the C++ part is not built: pip install --no-build-isolation anygauge-sim",
            *map(str, built),
        ),
        device_count=count if found else None,
        cards=("sim",),
    )


def _cards() -> tuple[Finding, int | None]:
    try:
        count = len(settings.read(os.environ).cards)
    except ValueError as error:
        return Finding.no(str(error)), None
    if not count:
        return Finding.no(f"{settings.VISIBLE} is empty: this process may see no card"), 0
    return Finding.not_needed("cards are simulated on the host"), count
