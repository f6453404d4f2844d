"""What there is of the simulated cards: the compiled part, and how many cards are asked for."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from anygauge.interface import Finding, Probe

CARDS = "ANYGAUGE_SIM_CARDS"
DEFAULT_CARDS = 8


def probe() -> Probe:
    """Look for the compiled part beside this file; imports no torch."""
    folder = Path(__file__).parent
    built = [folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in built if path.is_file()), None)
    text = os.environ.get(CARDS, str(DEFAULT_CARDS))
    count = int(text) if text.isdecimal() else None
    return Probe(
        devices=Finding.not_needed("cards are simulated on the host"),
        driver=Finding.not_needed("cards are simulated on the host"),
        software=Finding.yes(f"{text} simulated cards", str(found))
        if found
        else Finding.no(
            "the C++ part is not built: pip install --no-build-isolation anygauge-sim",
            *map(str, built),
        ),
        device_count=count if found else None,
    )
