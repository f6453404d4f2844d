"""Folders of runs that never took a step: what is left of them takes no name from a later run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

from anygauge.interface import AnygaugeError
from anygauge.util.files import read_text
from anygauge.util.start import START

LOCK = ".lock"
METRICS = "metrics.jsonl"
_METRICS_BYTES = 1 << 20
"""More than evaluations and samples before the first step come to."""

_FILES = re.compile(
    r"run\.(yaml|json)|job\.json|variables\.json|versions\.json|launched\.json|events\.jsonl|slurm\.sh"
    r"|metrics\.jsonl|environment-node[0-9]+\.json|(wandb|mlflow)-run\.json|cancelled"
    r"|rendezvous(-[0-9]+)?"
)
_FOLDERS = ("logs", "ranks", "tensorboard", "wandb", START)


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
            and not ("launched.json" in names and _may_run(folder))
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
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    from anygauge.cli.job import find
    from anygauge.cli.run_folder import LAUNCHED

    with contextlib.suppress(AnygaugeError, OSError, ValueError, RecursionError):
        launched = json.loads(read_text(folder / LAUNCHED, _METRICS_BYTES))
        return "logs" in launched or find(folder).alive is not False
    return True
