"""All checks of the kit in one table, all tests of the contract; importing it imports torch."""

from __future__ import annotations

from anygauge.testing import basic, device, ending, ranks
from anygauge.testing.check import CHECKS
from anygauge.testing.report import heading

__all__ = ["CHECKS", "basic", "contents", "device", "ending", "ranks"]


def contents() -> dict[str, tuple[str, str]]:
    """Every test of `BackendContract` as pytest names it: (part of the report, title)."""
    from anygauge.testing.contract import BackendContract  # which needs the table above

    found = {}
    for name, function in vars(BackendContract).items():
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        if not marks:
            found[name] = heading(function, {})
        for mark in marks:
            parameter, values = mark.args
            for value in values:
                label = getattr(value, "name", value)
                found[f"{name}[{label}]"] = heading(function, {parameter: value})
    return found
