"""A start of a run that its ranks have not accepted: its files wait beside those of the run.

A command that resumes a run writes what the start needs (run file, job file, logs, variables)
to `START` inside of the run directory. Ranks compare what they resume from with what was requested,
build all that training needs, and only then put these files in place. A start that is refused, or
fails before, has changed nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from anygauge.util.errors import AnygaugeError

START = ".start"
"""In a run directory: files of a start that is not accepted yet."""


def settled(path: Path) -> Path:
    """A file of a start, where it is now: where it was, or in place."""
    for folder in path.parents:
        if folder.name == START and not folder.is_dir():
            return folder.parent / path.relative_to(folder)
    return path


def put_in_place(staged: Path, home: Path) -> None:
    """Make the files of an accepted start, in `staged`, those of its run; for rank 0.

    All ranks must have read the run file by then. Logs that the run has are kept under another
    name, such as ``rank0.1.log``: processes still write to the new ones.

    Raises:
        AnygaugeError: a file cannot be moved.
    """
    if staged == home:
        return
    try:
        _move(staged, home)
    except OSError as error:
        raise AnygaugeError(
            f"the files of this start cannot be moved from {staged} to {home}: {error}. Check that "
            "the folder can be written, and give the same command again"
        ) from error


def _move(staged: Path, home: Path) -> None:
    for result in (home / "ranks").glob("rank*.json"):
        result.unlink()  # of the part before; this one writes its own at its end
    # Another machine may write a last file meanwhile.
    while files := [path for path in sorted(staged.rglob("*")) if not path.is_dir()]:
        for path in files:
            target = home / path.relative_to(staged)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.suffix == ".log" and target.exists():
                target.rename(_next(target))
            path.replace(target)
    shutil.rmtree(staged)


def _next(log: Path) -> Path:
    """The first name of ``rank0.1.log``, ``rank0.2.log``, ... that is free."""
    number, free = 1, log
    while free.exists():
        free = log.with_name(f"{log.stem}.{number}{log.suffix}")
        number += 1
    return free
