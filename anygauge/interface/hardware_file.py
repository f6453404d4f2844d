"""Reads a TOML file of cards and machines; what it may say, and in which units."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anygauge.interface.hardware import Card, Machine, Rates
from anygauge.util.errors import UsageError
from anygauge.util.text import did_you_mean

__all__ = [
    "BY_TYPE",
    "CARD_FIGURES",
    "FLOPS_TYPES",
    "MACHINE_FIGURES",
    "THIS_MACHINE",
    "read_hardware",
]

_PREFIXES = "kMGTP"
_BYTES = {
    "B": 1.0,
    **{f"{p}B": 1000.0 ** (n + 1) for n, p in enumerate(_PREFIXES)},
    **{f"{p.upper()}iB": 1024.0 ** (n + 1) for n, p in enumerate(_PREFIXES)},
}
_RATES = {
    **{f"{unit}/s": size for unit, size in _BYTES.items()},
    **{f"{p}b/s": 1000.0 ** (n + 1) / 8 for n, p in enumerate(_PREFIXES)},
}
_FLOPS = {"GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PLAIN: Mapping[str, float] = {}

CARD_FIGURES: Mapping[str, Mapping[str, float]] = {
    "memory": _BYTES,
    "reserved": _BYTES,
    "bandwidth": _RATES,
    "link": _RATES,
    "host_link": _RATES,
    "copy": _RATES,
    "exchange": _RATES,
    "call": _SECONDS,
    "issue": _SECONDS,
}
"""Figures of a card other than those by type -> units that each may have, as bytes, bytes per
second or seconds."""

_MEASURED = ("copy", "exchange", "call", "issue")
"""Of them, those that ranks which share a card may have of their own."""

BY_TYPE = ("flops", "matmul")
"""Rates of a card that have a figure for each type."""

MACHINE_FIGURES: Mapping[str, Mapping[str, float]] = {
    "cards": _PLAIN,
    "link": _RATES,
    "network": _RATES,
    "host_memory": _BYTES,
    "cores": _PLAIN,
    "disk": _BYTES,
    "disk_rate": _RATES,
    "price": _PLAIN,
}
"""Figures of a machine -> units; a plain number where there are none."""

_WHOLE = frozenset({"memory", "reserved", "cards", "host_memory", "cores", "disk"})
_MAY_BE_0 = frozenset({"link", "price", "reserved"})

FLOPS_TYPES = ("float32", "tf32", "bfloat16", "float16", "float8", "int8")

THIS_MACHINE = "this machine"
"""Stands for a figure that `BackendSpec.this_machine` gives."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]+)?)\s*(\S+)")


def read_hardware(
    text: str, where: str, *, backend: str = "", sourced: bool = True
) -> tuple[tuple[Card, ...], tuple[Machine, ...]]:
    """The cards and machines of a TOML file, in its order.

    Args:
        text: the file.
        where: what messages and `Card.origin` call it.
        backend: the backend whose file it is.
        sourced: whether each figure must have its source, as in what plugins ship; without, a bare
            figure's source is the file.

    Raises:
        UsageError: it is not TOML, or says what cannot be; names the place and what is valid.
    """
    try:
        document = tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not TOML: {error}") from None
    reader = _Reader(where, sourced)
    reader.known(document, ("card", "machine"), "")
    cards = [
        reader.card(name, table, backend)
        for name, table in reader.tables(document.get("card", {}), "card")
    ]
    machines = [
        reader.machine(name, table)
        for name, table in reader.tables(document.get("machine", {}), "machine")
    ]
    return tuple(cards), tuple(machines)


class _Reader:
    """Reads one file's tables; every message begins with the file and the place."""

    def __init__(self, where: str, sourced: bool) -> None:
        self._where = where
        self._sourced = sourced

    def card(self, name: str, table: Mapping[str, Any], backend: str) -> Card:
        place = f"card.{name}"
        plain = ("names", "backend", "shared_memory", "ranks")
        self.known(table, (*plain, *BY_TYPE, *CARD_FIGURES), place)
        figures, sources, asked = self._figures(table, CARD_FIGURES, place)
        for kind in BY_TYPE:
            figures[kind] = self._by_type(table, kind, place, sources)
        shared = table.get("shared_memory", False)
        if not isinstance(shared, bool):
            raise self._wrong(f"{place}.shared_memory", shared, "true or false")
        return Card(
            name=name,
            names=self._names(table, place),
            backend=self._text(table, "backend", place) or backend,
            shared_memory=shared,
            ranks=dict(self._ranks(table, place, sources)),
            asked=asked,
            sources=sources,
            origin=self._where,
            **figures,
        )

    def _by_type(
        self, table: Mapping[str, Any], kind: str, place: str, sources: dict[str, str]
    ) -> dict[str, float]:
        """Type -> rate; sources are added."""
        place = f"{place}.{kind}"
        rates = self._table(table.get(kind, {}), place)
        self.known(rates, FLOPS_TYPES, place)
        numbers, origins, _ = self._figures(rates, dict.fromkeys(FLOPS_TYPES, _FLOPS), place)
        sources |= {f"{kind}.{key}": text for key, text in origins.items()}
        return numbers

    def _ranks(
        self, table: Mapping[str, Any], place: str, sources: dict[str, str]
    ) -> Iterator[tuple[int, Rates]]:
        place = f"{place}.ranks"
        for count, rates in self._table(table.get("ranks", {}), place).items():
            here = f"{place}.{count}"
            if not (count.isdecimal() and 0 < int(count) <= 1024):
                raise self._wrong(place, count, f"a number of ranks, 1 to 1024: [{place}.2]")
            self.known(self._table(rates, here), ("matmul", *_MEASURED), here)
            figures, found, _ = self._figures(
                rates, {name: CARD_FIGURES[name] for name in _MEASURED}, here
            )
            matmul = self._by_type(rates, "matmul", here, found)
            sources |= {f"ranks.{count}.{name}": text for name, text in found.items()}
            yield int(count), Rates(matmul=matmul, **figures)

    def machine(self, name: str, table: Mapping[str, Any]) -> Machine:
        place = f"machine.{name}"
        self.known(table, ("names", "card", *MACHINE_FIGURES), place)
        figures, sources, _ = self._figures(table, MACHINE_FIGURES, place)
        return Machine(
            name=name,
            names=self._names(table, place),
            card=self._text(table, "card", place),
            sources=sources,
            origin=self._where,
            **figures,
        )

    def known(self, table: Mapping[str, Any], valid: Iterable[str], place: str) -> None:
        """Refuse keys that nobody reads."""
        valid = tuple(valid)
        for key in table:
            if key not in valid:
                hint = did_you_mean(key, valid) or ";"
                here = f"[{place}] has" if place else "it has"
                quotes = '. A name with a dot stands in quotes: [machine."a.b"]'
                raise UsageError(
                    f"{self._where}: {here} an unknown key {key!r}{hint} "
                    f"valid keys: {', '.join(valid)}"
                    + (quotes if isinstance(table[key], dict) else "")
                )

    def tables(self, value: Any, place: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
        for name, table in self._table(value, place).items():
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"{self._where}: [{place}.{name}]: a name is letters, digits, '.', '_' and '-'"
                    "; in quotes where it has a dot"
                )
            yield name, self._table(table, f"{place}.{name}")

    def _table(self, value: Any, place: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(place, value, f"a table: [{place}], then a line for each figure")
        return value

    def _text(self, table: Mapping[str, Any], key: str, place: str) -> str:
        value = table.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(f"{place}.{key}", value, "a name in quotes")
        return value

    def _names(self, table: Mapping[str, Any], place: str) -> tuple[str, ...]:
        names = table.get("names", [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise self._wrong(f"{place}.names", names, "a list of texts")
        return tuple(names)

    def _figures(
        self, table: Mapping[str, Any], kinds: Mapping[str, Mapping[str, float]], place: str
    ) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
        """(figure -> number, figure -> source, figures that are asked of the machine at hand)."""
        numbers: dict[str, Any] = {}
        sources: dict[str, str] = {}
        asked: list[str] = []
        for key, units in kinds.items():
            if key not in table:
                continue
            value, sources[key] = self._pair(table[key], f"{place}.{key}")
            if value == THIS_MACHINE:
                asked.append(key)
                continue
            numbers[key] = self._number(value, units, key, f"{place}.{key}")
        return numbers, sources, tuple(asked)

    def _pair(self, value: Any, place: str) -> tuple[Any, str]:
        """A figure and its source."""
        if isinstance(value, list):
            if len(value) == 2 and isinstance(value[1], str) and value[1].strip():
                return value[0], value[1].strip()
            raise self._wrong(place, value, 'a figure and its source: ["79.1 GiB", "measured"]')
        if self._sourced:
            raise self._wrong(place, value, f'its source beside it: [{value!r}, "where from"]')
        return value, self._where

    def _number(self, value: Any, units: Mapping[str, float], key: str, place: str) -> float | int:
        if not units:
            number = value if isinstance(value, (int, float)) else None
            if number is None or isinstance(value, bool) or (key in _WHOLE and number % 1):
                whole = "a whole number" if key in _WHOLE else "a number"
                raise self._wrong(place, value, f"{whole}, without quotes")
        else:
            found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
            if found is None or found[2] not in units:
                valid = ", ".join(units)
                raise self._wrong(place, value, f"a number and its unit in quotes, of {valid}")
            number = float(found[1]) * units[found[2]]
        if not (0 <= number < 1e18) or (number == 0 and key not in _MAY_BE_0):
            raise self._wrong(place, value, "a number above 0")
        return int(number) if key in _WHOLE else float(number)

    def _wrong(self, place: str, value: Any, valid: str) -> UsageError:
        return UsageError(f"{self._where}: {place} is {value!r}; it must be {valid}")
