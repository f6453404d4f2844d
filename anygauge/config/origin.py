"""Where a value of a run file was written, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from anygauge.interface import RunFileError

_SHOWN = 50
_WIDTH = 4000


@dataclass(frozen=True, slots=True)
class Origin:
    """A place that a user can go to and change.

    Attributes:
        label: a file as the user named it, or a command line option ("--set train.steps=10").
        line: line in that file, counted from 1; None for options and for a file as a whole.
        folder: what a relative path written there is relative to.
    """

    label: str
    line: int | None
    folder: Path

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One complaint, shown as one line: "FILE:LINE: dotted.path: text"."""

    origin: Origin
    path: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin), self.path, self.text) if part)


def run_file_error(name: str, problems: Iterable[Problem]) -> RunFileError:
    """All complaints in one error: a header, then a line each, in the order of the file.

    Args:
        name: the run file as the user named it; its complaints come first.
        problems: at least one; doubles are shown once, and of very many the first.
    """
    unique = list(dict.fromkeys(problems))
    labels = list(dict.fromkeys([name, *(problem.origin.label for problem in unique)]))
    unique.sort(key=lambda problem: (labels.index(problem.origin.label), problem.origin.line or 0))
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    lines = [f"  {_shortened(str(each))}" for each in unique[:_SHOWN]]
    if len(unique) > _SHOWN:
        count = f"more than {_SHOWN} problems, first"
    return RunFileError("\n".join([f"{name}: {count}", *lines]))


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}... ({len(line):,} characters)"


def dotted(path: Iterable[object]) -> str:
    """A path as a user writes it: ("adapter", "targets", 0) is adapter.targets[0]."""
    text = ""
    for part in path:
        if isinstance(part, int) and not isinstance(part, bool):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
