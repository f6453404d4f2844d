"""The folder of a run: which one it is, what is in it, and that no other run writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import ACCEPTED, ATTEMPTS, AnygaugeError, Job
from anygauge.launch.submitted import LAUNCHED, find_job
from anygauge.util.files import part_of, read_text, write_text
from anygauge.util.run_lock import LOCK, open_lock

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.training.checkpoints.identity import Finished

RUN_FILE = "run.yaml"
"""For people and for commands; ranks and their agents read `Job.run_file`."""
RESOLVED = "run.json"
RENDEZVOUS = "rendezvous"
CANCELLED = "cancelled"
"""There since the job of `LAUNCHED` was asked to end."""

METRICS = "metrics.jsonl"
_METRICS_BYTES = 1 << 20
"""More than evaluations and samples before the first step come to."""

_FILES = re.compile(
    r"run\.(yaml|json)|job\.json|variables\.json|versions\.json|launched\.json|events\.jsonl|slurm\.sh"
    r"|metrics\.jsonl|environment-node[0-9]+\.json|(wandb|mlflow)-run\.json|cancelled"
    r"|rendezvous(-[0-9]+)?"
)
_FOLDERS = ("logs", "ranks", "tensorboard", "wandb", ATTEMPTS)

_DECIDE = ("model", "adapter", "data", "train")
"""Sections that decide what is trained, and for how long."""


def choose_run_directory(wanted: Path, *, resume: bool) -> Path:
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
    from anygauge.config.resolved import dump_run, run_json

    write_text(resolved, run_json(run), 0o600)
    write_text(resolved.with_name(RUN_FILE), dump_run(run), 0o600)


def goes_on(folder: Path) -> bool:
    """Whether a folder holds a run that took steps, or one that is about to."""
    return (folder / RUN_FILE).is_file() and not took_no_step(folder)


def logs_of(folder: Path) -> Path:
    """Where the logs of a run's last start are."""
    resumed = [path / "logs" for path in (folder / ATTEMPTS).glob("*") if (path / "logs").is_dir()]
    return max(resumed, key=lambda path: path.parent.name, default=folder / "logs")


def clear_for_start(folder: Path, resuming: Job | None = None) -> None:
    """Clear a claimed folder of what earlier starts left that came to nothing.

    Args:
        resuming: the run in the folder stays; this start of it gets a folder of its own.

    Raises:
        AnygaugeError: another run has taken the folder since it was chosen.
    """
    if resuming is not None:
        remove_unaccepted(folder)
        Path(resuming.run_file).parent.mkdir(parents=True)
    elif took_no_step(folder, locked=True):
        clear(folder)
    else:
        raise AnygaugeError(
            f"{folder} has just been taken by another run; repeat the command, or choose another "
            "'name'"
        )


def remove_unaccepted(folder: Path) -> None:
    """Remove the folders of starts that ranks refused, or had nothing to do for."""
    for attempt in (folder / ATTEMPTS).glob("*"):
        if not (attempt / ACCEPTED).exists():
            shutil.rmtree(attempt, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / ATTEMPTS).rmdir()


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[int]:
    """Keep other runs out of a folder.

    Yields:
        The descriptor that holds the claim. The kernel ends it with the last process that has it:
        an agent that inherits it (`Plan.held`) keeps the folder until its ranks have ended, even
        if this process is killed.

    Raises:
        AnygaugeError: a run is writing to it now, or its lock cannot be opened.
    """
    lock = open_lock(folder)
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
        for name in ("adapter", "model"):  # a result that a kill has left half-written
            shutil.rmtree(part_of(folder / name), ignore_errors=True)
        yield lock
    finally:
        os.close(lock)


# -- starts that came to nothing take no name from a later run -------------------------------------


def took_no_step(folder: Path, *, locked: bool = False) -> bool:
    """Whether a folder holds nothing but a start that came to nothing, or nothing at all.

    Whatever is not known as a file of such a start makes it someone's folder.

    Args:
        locked: the caller holds the folder's lock; otherwise, a run that does may be about to take
            its first step.
    """
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name != LOCK]
        ours = all(
            entry.name in _FOLDERS
            if entry.is_dir(follow_symlinks=False)
            else entry.is_file(follow_symlinks=False) and _FILES.fullmatch(entry.name)
            for entry in entries
        )
        names = {entry.name for entry in entries}
        return (
            ours
            and not (METRICS in names and _steps_in(folder / METRICS))
            and (locked or not _in_use(folder))
            and not (LAUNCHED in names and _may_run(folder))
        )
    except OSError:
        return False


def clear(folder: Path) -> None:
    """Remove what `took_no_step` found; for whoever holds the folder's lock."""
    for entry in os.scandir(folder):
        if entry.name in _FOLDERS and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif _FILES.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            Path(entry.path).unlink()


def _steps_in(metrics: Path) -> bool:
    """Whether a step was taken, or that cannot be known."""
    try:
        for line in read_text(metrics, _METRICS_BYTES).splitlines():
            step = json.loads(line).get("step")
            if step is not None and step != 0:
                return True
    except (OSError, ValueError, AttributeError, RecursionError):
        return True
    return False


def _in_use(folder: Path) -> bool:
    """Whether a run holds the folder's lock now."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _may_run(folder: Path) -> bool:
    """Whether a job may still wait or run, or was handed to machines whose files are not here."""
    with contextlib.suppress(AnygaugeError, OSError, ValueError, RecursionError):
        launched = json.loads(read_text(folder / LAUNCHED, _METRICS_BYTES))
        return "logs" in launched or find_job(folder).alive is not False
    return True


# -- runs that are to be resumed: what can be said before a rank is started -----------------------


def check_named(run: Any, checkpoint: Path) -> None:
    """What ranks would refuse of ``--resume FOLDER``, but for the contents of its large files."""
    from anygauge.training.checkpoints.identity import check_same_run, identity_of_file
    from anygauge.training.checkpoints.sound import read_record, refusal_of

    refusal = refusal_of(checkpoint, contents=False)
    if refusal is not None:
        raise AnygaugeError(refusal)
    check_same_run(checkpoint, read_record(checkpoint)["identity"], identity_of_file(run))


def finished_before(run: Any, folder: Path) -> Finished | None:
    """The run of a folder, if it is done and just this was asked for; reads records, no tensors.

    Where sections differ, the ranks decide: they know the data and the number of steps.

    Raises:
        RunFileError: what the folder holds belongs to another run.
    """
    from anygauge.training.checkpoints.identity import (
        check_same_run,
        finished_run,
        identity_of_file,
    )
    from anygauge.training.checkpoints.sound import checkpoints_in, complaint_about, read_record

    finished = finished_run(folder)
    kept, where = (finished.identity if finished else {}), folder
    if not kept:
        sound = (p for p in checkpoints_in(folder) if complaint_about(p, contents=False) is None)
        newest = next(sound, None)
        if newest is not None:
            kept, where = read_record(newest)["identity"], newest
    if kept:
        check_same_run(where, kept, identity_of_file(run))
    return finished if finished and _asks_the_same(run, folder) else None


def _asks_the_same(run: Any, folder: Path) -> bool:
    from anygauge.config.load import load_run_file

    try:
        before = load_run_file(folder / RUN_FILE).run
    except AnygaugeError:
        return False
    return all(getattr(before, name) == getattr(run, name) for name in _DECIDE)
