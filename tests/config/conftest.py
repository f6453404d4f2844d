"""What every test of this room needs: a folder of run files and a way to load one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import RunFileError

MINIMAL = "model: {name: some/model}\ndata: {train: {path: rows.jsonl}}\n"


class Folder:
    """A folder of run files that is the current directory as well."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(dedent(text), encoding="utf-8")
        return target

    def load(
        self, text: str, *overrides: str, flags: Mapping[str, Any] | None = None, **environ: str
    ) -> RunFile:
        """Loads `text` as run.yaml."""
        self.write("run.yaml", text)
        return load_run_file("run.yaml", overrides, flags, environ=environ)

    def refuse(
        self, text: str, *overrides: str, flags: Mapping[str, Any] | None = None, **environ: str
    ) -> list[str]:
        """The lines of the complaint about `text` as run.yaml, without header and indent."""
        with pytest.raises(RunFileError) as caught:
            self.load(text, *overrides, flags=flags, **environ)
        header, *lines = str(caught.value).split("\n")
        if not lines:
            return [header]
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        assert header == f"run.yaml: {count}"
        assert all(line.startswith("  ") for line in lines)
        return [line[2:] for line in lines]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)


@pytest.fixture
def minimal() -> str:
    return MINIMAL
