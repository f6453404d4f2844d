"""The id that a tracker gave to a run, kept in the run directory so that a resumed run goes on."""

from __future__ import annotations

import json
from pathlib import Path

from anygauge.util.files import write_text


class KeptId:
    """One file of a run directory with one id in it."""

    def __init__(self, run_directory: Path, tracker: str) -> None:
        self._path = run_directory / f"{tracker}-run.json"

    def read(self) -> str | None:
        """The id; None where there is none yet, or what is there is no such file."""
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return value if isinstance(value, str) and value else None

    def write(self, value: str) -> None:
        """Keep an id."""
        write_text(self._path, json.dumps({"id": value}) + "\n")
