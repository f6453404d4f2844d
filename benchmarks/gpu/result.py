"""What a part found: rows of figures, each beside its prediction, written as they come."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.util.files import write_text
from benchmarks.table import TableRow

OK, FAILED, SKIPPED, LATE = "ok", "failed", "skipped", "out of time"


class SkipPartError(Exception):
    """A part, or one case of it, does not suit this machine; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One part, over.

    Attributes:
        status: ok, failed, skipped or out of time.
        problem: why, with the end of the log.
        seconds: that it took, of those that it was allowed.
    """

    part: str
    title: str
    status: str
    seconds: float
    allowed: float
    rows: tuple[TableRow, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return dataclasses.asdict(self)


class Report:
    """What a part's process fills: the file is whole after every row, should the process be ended.

    Args:
        path: a JSON file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[TableRow] = []
        self.notes: list[str] = []

    def add(self, row: TableRow) -> None:
        """One more row."""
        self.rows.append(row)
        self._write()

    def note(self, text: str) -> None:
        """A sentence below the table."""
        if text not in self.notes:
            self.notes.append(text)
            self._write()

    def _write(self) -> None:
        record = {"rows": [dataclasses.asdict(row) for row in self.rows], "notes": self.notes}
        write_text(self._path, json.dumps(record, indent=2) + "\n")


def read_report(path: Path) -> tuple[tuple[TableRow, ...], tuple[str, ...]]:
    """(rows, notes) of a part's file; none where it wrote nothing."""
    if not path.is_file():
        return (), ()
    record = json.loads(path.read_text(encoding="utf-8"))
    return tuple(TableRow(**row) for row in record["rows"]), tuple(record["notes"])
