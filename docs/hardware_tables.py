"""The documentation's tables of cards and machines, made from the descriptions themselves.

``python docs/hardware_tables.py docs/hardware.md`` writes the page anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import Card
from anygauge.planning.machines import Hardware, Machine
from anygauge.registry import BLOCK_VARIABLE, Registry
from anygauge.util.files import write_text

ROOT = Path(__file__).parents[1]

TABLES = "## Cards\n\n"
"""Where the tables begin."""


def page(text: str, hardware: Hardware) -> str:
    """The page with new tables; the text before them is written by hand."""
    return "".join(
        [
            text.partition(TABLES)[0],
            TABLES,
            *_table(hardware.cards, CARD_COLUMNS),
            "\nSources of the figures:\n\n",
            *map(_sources, hardware.cards),
            "\n## Machines\n\n",
            *_table([hardware.machine(m.name) for m in hardware.machines], MACHINE_COLUMNS),
            "\nSources of the figures:\n\n",
            *map(_sources, hardware.machines),
        ]
    )


def shipped() -> Hardware:
    """The descriptions of this distribution and of examples/hardware."""
    registry = Registry.load()
    others = {p.distribution for p in registry.plugins} - {"anygauge"}
    own = Registry.load({BLOCK_VARIABLE: ",".join(others)})
    return Hardware.load(own, sorted((ROOT / "examples/hardware").glob("*.toml")))


def _amount(value: float | None, unit: float, digits: int = 0) -> str:
    return "?" if value is None else f"{value / unit:,.{digits}f}"


def _memory(card: Card) -> str:
    return "this machine" if "memory" in card.asked else _amount(card.memory, 2**30, 2)


def _rate(kind: str, of: str = "flops") -> Callable[[Card], str]:
    return lambda card: _amount(getattr(card, of).get(kind), 1e12, 1)


CARD_COLUMNS: Mapping[str, Callable[[Card], str]] = {
    "card": lambda card: f"`{card.name}`",
    "backend": lambda card: f"`{card.backend}`" if card.backend else "none",
    "memory, GiB": _memory,
    "reserved, GiB": lambda card: _amount(card.reserved, 2**30, 2),
    "bfloat16, TFLOPS": _rate("bfloat16"),
    "measured": _rate("bfloat16", "matmul"),
    "float16": _rate("float16"),
    "float32": _rate("float32"),
    "bandwidth, GB/s": lambda card: _amount(card.bandwidth, 1e9),
    "link, GB/s": lambda card: _amount(card.link, 1e9, 1),
    "host link, GB/s": lambda card: _amount(card.host_link, 1e9, 1),
}

MACHINE_COLUMNS: Mapping[str, Callable[[Machine], str]] = {
    "machine": lambda machine: f"`{machine.name}`",
    "cards": lambda machine: f"{machine.cards} x `{machine.card}`",
    "link, GB/s": lambda machine: _amount(machine.link, 1e9, 1),
    "network, GB/s": lambda machine: _amount(machine.network, 1e9, 1),
    "host memory, GiB": lambda machine: _amount(machine.host_memory, 2**30),
    "cores": lambda machine: _amount(machine.cores, 1),
    "disk, GB": lambda machine: _amount(machine.disk, 1e9),
    "disk, GB/s": lambda machine: _amount(machine.disk_rate, 1e9),
}


def _table(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n",
        *(f"| {' | '.join(cell(row) for cell in columns.values())} |\n" for row in rows),
    ]


def _sources(described: Card | Machine) -> str:
    """One line: each source with the figures that it is for."""
    by_source: dict[str, list[str]] = {}
    for figure, source in described.sources.items():
        by_source.setdefault(source, []).append(figure)
    parts = [f"{', '.join(figures)}: {source}" for source, figures in by_source.items()]
    others = f" ({', '.join(described.names)})" if described.names else ""
    return f"- `{described.name}`{others}. {'; '.join(parts)}\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_text(path, page(path.read_text(encoding="utf-8"), shipped()))
