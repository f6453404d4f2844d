"""Looks at each field that the agent of another node sends, before it is believed.

JSON knows numbers that no clock shows and texts that no encoding holds. A field that is not as an
agent of this version sends it is a `ValueError`, in words: it ends the link it came by, and
nothing else.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]

_LONGEST_S = 1e12


def is_text(value: object) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_truth(value: object) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def is_count(value: object) -> bool:
    """Whether it is a whole number that a rank or a step may have."""
    return type(value) is int and 0 <= value < 2**63


def is_status(value: object) -> bool:
    """Whether a process can exit with it."""
    return type(value) is int and 0 <= value < 256


def is_time(value: Any) -> bool:
    """Whether it is a moment or a distance in seconds, such as a clock may show."""
    # Compared before it is converted: a whole number may be too large to be a float. No comparison
    # with NaN holds.
    return type(value) in (int, float) and -_LONGEST_S < value < _LONGEST_S


def is_signal(value: object) -> bool:
    """Whether it is the number of a signal."""
    return type(value) is int and value in {int(each) for each in signal.Signals}


def or_none(check: Check) -> Check:
    """What `check` takes, or nothing."""
    return lambda value: value is None or check(value)


def shown(value: object) -> str:
    """A value in a message, shortened; never the inside of one that holds others."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    return repr(value)[:40]


def field_of(message: Mapping[str, Any], name: str, check: Check) -> Any:
    """One field; None where it is missing and may be.

    Raises:
        ValueError: it is not as `check` wants it; says which.
    """
    value = message.get(name)
    if not check(value):
        said = f"has a value that it cannot have: {shown(value)}"
        raise ValueError(f"{name!r} {said if name in message else 'is missing'}")
    return value


def fields_of(record: object, checks: Mapping[str, Check]) -> dict[str, Any]:
    """A mapping that has these fields and no other, each of them looked at.

    Raises:
        ValueError: a field is missing, unknown, or not as its check wants it; says which.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{shown(record)} is not a mapping of fields")
    for name in sorted(checks.keys() ^ record.keys()):
        raise ValueError(f"{shown(name)} is {'missing' if name in checks else 'unknown'}")
    return {name: field_of(record, name, check) for name, check in checks.items()}
