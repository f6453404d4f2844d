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

from anygauge.interface import (
    ACCEPTED,
    ATTEMPTS,
    PROFILE,
    AnygaugeError,
    Job,
    RunningJob,
    UsageError,
)
from anygauge.util.files import part_of, read_json, read_text, write_text
from anygauge.util.run_lock import LOCK, open_lock

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile

RUN_FILE = "run.yaml"
"""For people and for commands; ranks and their agents read `Job.run_file`."""
RESOLVED = "run.json"
RENDEZVOUS = "rendezvous"
LAUNCHED = "launched.json"
"""Of a job that runs without the command that started it: which launcher has it, and how that finds
it again."""
CANCELLED = "cancelled"
"""There since the job of `LAUNCHED` was asked to end."""

METRICS = "metrics.jsonl"
_METRICS_BYTES = 1 << 20
"""More than evaluations and samples before the first step come to."""

_FILES = re.compile(
    r"\.lock|run\.(yaml|json)|job\.json|variables\.json|versions\.json|launched\.json|cancelled"
    r"|metrics\.jsonl|events\.jsonl|environment-node[0-9]+\.json|(wandb|mlflow)-run\.json"
    r"|rendezvous(-[0-9]+)?|slurm\.sh|checkpoint-now"
)
_FOLDERS = ("logs", PROFILE, "ranks", "tensorboard", "wandb", ATTEMPTS)


def choose_run_directory(wanted: Path, *, resume: bool) -> Path:
    """Where a run writes, absolute: `wanted`, or the first of ``wanted-2``, ``wanted-3``, ... that
    is not a run's already. A start that never took a step has no claim to its name.

    Args:
        resume: continue in `wanted` if a run was there before.
    """
    wanted = wanted.absolute()
    if resume and (wanted / RUN_FILE).is_file():
        return wanted
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


def logs_of(folder: Path) -> Path:
    """Return the folder of the logs of a run's last start."""
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
        return
    if not took_no_step(folder, locked=True):
        raise AnygaugeError(
            f"{folder} has just been taken by another run; repeat the command, or choose another "
            "'name'"
        )
    for entry in os.scandir(folder):
        if entry.is_dir():
            shutil.rmtree(entry.path)
        elif entry.name != LOCK:
            Path(entry.path).unlink()


def remove_unaccepted(folder: Path) -> None:
    """Remove the folders of starts that ranks refused, or had nothing to do for."""
    for attempt in (folder / ATTEMPTS).glob("*"):
        if not (attempt / ACCEPTED).exists():
            shutil.rmtree(attempt, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / ATTEMPTS).rmdir()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
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


def took_no_step(folder: Path, *, locked: bool = False) -> bool:
    """Whether a folder holds nothing but a start that came to nothing, or nothing at all.

    Whatever is not known as a file of such a start makes it someone's folder.

    Args:
        locked: the caller holds the folder's lock; otherwise, a run that does may be about to take
            its first step.
    """
    try:
        return (
            all(map(_is_of_a_start, list(os.scandir(folder))))
            and not _has_steps(folder / METRICS)
            and (locked or not _in_use(folder))
            and not _may_run(folder)
        )
    except OSError:
        return False


def _is_of_a_start(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return entry.name in _FOLDERS
    return entry.is_file(follow_symlinks=False) and bool(_FILES.fullmatch(entry.name))


def _has_steps(metrics: Path) -> bool:
    """Whether a step was taken, or that cannot be known."""
    try:
        text = read_text(metrics, _METRICS_BYTES)
        return any(json.loads(line).get("step") for line in text.splitlines())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError, RecursionError):
        return True


def _in_use(folder: Path) -> bool:
    """Whether a run holds the folder's lock now."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _may_run(folder: Path) -> bool:
    """Whether a job may still wait or run, or was handed to machines whose files are not here."""
    if not (folder / LAUNCHED).exists():
        return False
    try:
        return "logs" in read_record(folder) or not find_job(folder).state().has_ended
    except AnygaugeError:
        return True


def find_job(folder: Path) -> RunningJob:
    """The job of a run.

    Raises:
        UsageError: there is no record of one.
        AnygaugeError: it cannot be read.
    """
    from anygauge.registry import installed_plugins

    launched = read_record(folder)
    launcher = installed_plugins().launcher(str(launched["launcher"]))()
    job: RunningJob = launcher.attach(launched["record"], folder.absolute())
    return job


def read_record(folder: Path) -> dict[str, Any]:
    """What `LAUNCHED` says: ``launcher``, ``record`` and, of a job whose files are elsewhere,
    ``logs``: what shows them.

    Raises:
        UsageError: there is none.
        AnygaugeError: it cannot be read.
    """
    try:
        launched = dict(read_json(folder / LAUNCHED))
        launched["launcher"], launched["record"]
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is not a folder; name the run's folder, such as runs/NAME"
            ) from error
        raise UsageError(
            f"{folder} has no {LAUNCHED}, so no job was submitted from there. `anygauge job` "
            "serves jobs that run without the command that started them"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AnygaugeError(f"{folder / LAUNCHED} cannot be read: {error}") from error
    return launched
