"""Published peak rates of NVIDIA GPUs, by the name that the driver gives them.

They stand in cards.toml. A card that is not listed has no known peak: a guess would make a wrong
utilisation look measured.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from anygauge.interface import Card, PeakFlops, read_cards


def published_peak(device_name: str, dtype: str) -> PeakFlops | None:
    """The dense peak of a card for ``float32``, ``float16`` or ``bfloat16``, or None."""
    card = _by_driver_name().get(device_name)
    if card is None or dtype not in card.flops:
        return None
    return PeakFlops(value=card.flops[dtype], source=card.sources[f"flops.{dtype}"])


@cache
def _by_driver_name() -> dict[str, Card]:
    """Whole names only: those of slices of a card, and of other cards, begin alike."""
    file = Path(__file__).with_name("cards.toml")
    cards = read_cards(file.read_text(encoding="utf-8"), file.name)
    return {name: card for card in cards for name in card.names}
