"""The folder of a run: which one it is, and that no other run writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.cli.failed_start import LOCK, clear, took_no_step
from anygauge.interface import AnygaugeError
from anygauge.util.files import write_text
from anygauge.util.start import START

if TYPE_CHECKING:
    from anygauge.config import RunFile

RUN_FILE = "run.yaml"
"""For people and for commands; ranks and their agents read `Job.run_file`."""
RESOLVED = "run.json"
RENDEZVOUS = "rendezvous"
LAUNCHED = "launched.json"
"""Which launcher has the job, and how it finds it again."""
CANCELLED = "cancelled"
"""There since the job of `LAUNCHED` was asked to end."""


def run_folder(wanted: Path, *, resume: bool) -> Path:
    """Where a run writes, absolute.

    Args:
        resume: continue in `wanted` if a run was there before.
    """
    wanted = wanted.absolute()
    return wanted if resume and (wanted / RUN_FILE).is_file() else _free(wanted)


def _free(wanted: Path) -> Path:
    """`wanted`, or the first of ``wanted-2``, ``wanted-3``, ... that is not a run's already.

    A start that never took a step has no claim to its name.
    """
    number, folder = 1, wanted
    while folder.exists() and not (folder.is_dir() and took_no_step(folder)):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def write_run(resolved: Path, run: RunFile) -> None:
    """Write a run for agents and ranks, and beside it for people.

    Args:
        resolved: `Job.run_file`.
    """
    from anygauge.config import dump_run, run_json

    write_text(resolved, run_json(run), 0o600)
    write_text(resolved.with_name(RUN_FILE), dump_run(run), 0o600)


def goes_on(folder: Path) -> bool:
    """Whether a folder holds a run that took steps, or one that is about to."""
    return (folder / RUN_FILE).is_file() and not took_no_step(folder)


def logs_of(folder: Path) -> Path:
    """Where the logs of a run's last start are: those of one that its ranks have not accepted are
    beside those of the run."""
    waiting = folder / START / "logs"
    return waiting if waiting.is_dir() else folder / "logs"


def made_ready(folder: Path, *, staged: bool) -> None:
    """Clear a claimed folder of what an earlier start left that came to nothing.

    Args:
        staged: the run in it stays; the files of this start wait in `START`.

    Raises:
        AnygaugeError: another run has taken the folder since it was chosen.
    """
    if staged:
        shutil.rmtree(folder / START, ignore_errors=True)
        (folder / START).mkdir()
    elif took_no_step(folder, locked=True):
        clear(folder)
    else:
        raise AnygaugeError(
            f"{folder} has just been taken by another run; repeat the command, or choose another "
            "'name'"
        )


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """Keep other runs out of a folder.

    Yields:
        The descriptor that holds the claim. The kernel ends it with the last process that has it:
        an agent that inherits it (`Plan.held`) keeps the folder until its ranks have ended, even
        if this process is killed.

    Raises:
        AnygaugeError: a run is writing to it now, or its lock cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _open_lock(folder / LOCK)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnygaugeError(
                f"a run is writing to {folder} now; wait until it ends, or give this run another "
                "'name' or --output. If its command was killed, it may still be writing a "
                "checkpoint"
            ) from None
        (folder / CANCELLED).unlink(missing_ok=True)
        # Where ranks of an earlier part of the run met: they would take each other for alive.
        (folder / RENDEZVOUS).unlink(missing_ok=True)
        yield lock
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    """Open a lock file, which need not be there; nothing is written to it.

    Raises:
        AnygaugeError: something else is there, or it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise AnygaugeError(_no_lock(path, "a link")) from None
        raise AnygaugeError(
            f"{path} cannot be opened: {error.strerror}. This lock keeps two runs out of one "
            "folder: make sure that you can read and write it, or give the run another 'name' or "
            "--output"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AnygaugeError(_no_lock(path, "not a regular file"))
    if descriptor > 2:
        return descriptor
    # Where standard streams were closed, a child's own ones would take its place.
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _no_lock(path: Path, what: str) -> str:
    return (
        f"{path} is {what}. anygauge creates this lock itself, to keep two runs out of one folder, "
        "and uses nothing else in its place: remove it, or give the run another 'name' or --output"
    )
