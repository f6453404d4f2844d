"""Settings of the simulated cards, read from the environment: strictly, and without torch.

| variable | meaning |
|---|---|
| ``ANYGAUGE_SIM_CARDS`` | cards of the machine |
| ``ANYGAUGE_SIM_CAPACITY`` | bytes of each |
| ``ANYGAUGE_SIM_VISIBLE_CARDS`` | numbers of those that this process may see, as ``0,2,3`` |
| ``ANYGAUGE_SIM_LOCKS`` | folder of the cards' lock files; empty for none |
| ``ANYGAUGE_SIM_TRACE`` | file that gets a line per operation and collective; empty for none |
| ``ANYGAUGE_SIM_FAULTS`` | what goes wrong on purpose, separated by commas: see `Faults` |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CARDS = "ANYGAUGE_SIM_CARDS"
CAPACITY = "ANYGAUGE_SIM_CAPACITY"
VISIBLE = "ANYGAUGE_SIM_VISIBLE_CARDS"
LOCKS = "ANYGAUGE_SIM_LOCKS"
TRACE = "ANYGAUGE_SIM_TRACE"
FAULTS = "ANYGAUGE_SIM_FAULTS"

DEFAULT_CARDS = 8
DEFAULT_CAPACITY = 2**35
MOST_CARDS = 64
LARGEST = 2**63 - 1  # torch counts bytes in signed numbers

COLLECTIVES = (
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "send",
    "recv",
    "barrier",
)
"""The names by which simccl counts, traces and fails."""

ANY = "any"


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """What goes wrong on purpose. Calls are counted in this process, from 1.

    Attributes:
        allocations: those that are refused (``oom@N``).
        failing: collective, or ``any`` -> which of its calls raise (``fail:COLLECTIVE@N``).
        hanging: collective, or ``any`` -> which of its calls never end (``hang:COLLECTIVE@N``).
        slow: number of a card -> how many times as long its operations take
            (``slow:CARD@FACTOR``).
    """

    allocations: frozenset[int]
    failing: Mapping[str, frozenset[int]]
    hanging: Mapping[str, frozenset[int]]
    slow: Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cards: numbers, on the machine, of the cards that this process may see.
        capacity: bytes of each.
        locks: folder of lock files, ``""`` for none.
        trace: path, ``""`` for none.
        faults: what goes wrong on purpose.
    """

    cards: tuple[int, ...]
    capacity: int
    locks: str
    trace: str
    faults: Faults

    def make_lock_folder(self) -> None:
        """Make the folder of lock files, if it is missing.

        Raises:
            ValueError: it cannot be made.
        """
        if not self.locks:
            return
        try:
            Path(self.locks).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{LOCKS}: cannot make the folder '{self.locks}': {error.strerror}; name another"
            ) from error


def read(environ: Mapping[str, str]) -> Settings:
    """Read all settings; touches no file.

    Raises:
        ValueError: one of them is wrong: says which, what it holds and what is valid.
    """
    count = _number(environ, CARDS, DEFAULT_CARDS, MOST_CARDS)
    return Settings(
        cards=_visible(environ.get(VISIBLE), count),
        capacity=_number(environ, CAPACITY, DEFAULT_CAPACITY, LARGEST),
        locks=environ.get(LOCKS, _default_locks(environ)),
        trace=environ.get(TRACE, ""),
        faults=_faults(environ.get(FAULTS, ""), count),
    )


def _default_locks(environ: Mapping[str, str]) -> str:
    # Processes of one user must meet in it, so it has a name that all of them know.
    return str(Path(environ.get("TMPDIR") or "/tmp") / f"anygauge-sim-{os.getuid()}")


def _whole(text: str) -> int | None:
    """A number of digits only: int() would take signs, spaces and underscores."""
    return int(text) if re.fullmatch("[0-9]{1,19}", text) else None


def _number(environ: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = environ.get(name, str(default))
    value = _whole(text)
    if not value or value > most:
        raise ValueError(f"{name}: '{text}' is not a positive whole number up to {most}")
    return value


def _visible(text: str | None, count: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(count))
    found: list[int] = []
    for item in text.split(",") if text else []:
        number = _whole(item)
        if number is None or number >= count:
            raise ValueError(
                f"{VISIBLE}: '{item}' is not a card of 0 to {count - 1}; they are listed as 0,2,3"
            )
        if number in found:
            raise ValueError(f"{VISIBLE}: '{text}' names card {number} twice; name each once")
        found.append(number)
    return tuple(found)


def _faults(text: str, count: int) -> Faults:
    allocations: set[int] = set()
    calls: dict[str, dict[str, set[int]]] = {"fail": {}, "hang": {}}
    slow: dict[int, float] = {}
    seen: set[tuple[str, int]] = set()
    for item in text.split(",") if text else []:
        parts = re.fullmatch("([a-z]+)(?::([a-z0-9_]+))?@([0-9.]+)", item)
        kind, of, value = parts.groups() if parts else ("", None, "")
        nth = _whole(value)
        if kind == "oom" and of is None and nth:
            key = (kind, nth)
            allocations.add(nth)
        elif kind in calls and of in (ANY, *COLLECTIVES) and nth:
            key = (of, nth)
            calls[kind].setdefault(of, set()).add(nth)
        elif kind == "slow" and of and _is_card(of, count) and _is_factor(value):
            key = (kind, int(of))
            slow[int(of)] = float(value)
        else:
            raise ValueError(
                f"{FAULTS}: '{item}' is none of oom@N, fail:COLLECTIVE@N, hang:COLLECTIVE@N, "
                f"slow:CARD@FACTOR; N counts from 1, FACTOR is more than 1, CARD one of 0 to "
                f"{count - 1}, COLLECTIVE one of {', '.join((ANY, *COLLECTIVES))}"
            )
        if key in seen:
            raise ValueError(
                f"{FAULTS}: '{item}' comes second for the same call or card in '{text}'"
            )
        seen.add(key)
    return Faults(
        allocations=frozenset(allocations),
        failing={name: frozenset(which) for name, which in calls["fail"].items()},
        hanging={name: frozenset(which) for name, which in calls["hang"].items()},
        slow=slow,
    )


def _is_card(text: str, count: int) -> bool:
    number = _whole(text)
    return number is not None and number < count


def _is_factor(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text)) and float(text) > 1
