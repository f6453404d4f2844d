"""Jobs that run without the command that started them: their record in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, RunningJob, UsageError

LAUNCHED = "launched.json"
"""Which launcher has the job, and how it finds it again."""


def find_job(folder: Path) -> RunningJob:
    """The job of a run.

    Raises:
        UsageError: there is no record of one.
        AnygaugeError: it cannot be read.
    """
    from anygauge.registry import installed_plugins

    launched = read_record(folder)
    launcher = installed_plugins().launcher(str(launched["launcher"]))()
    return launcher.attach(launched["record"], folder.absolute())


def read_record(folder: Path) -> dict[str, Any]:
    """What `LAUNCHED` says: ``launcher``, ``record`` and, of a job whose files are elsewhere,
    ``logs``: what shows them.

    Raises:
        UsageError: there is none.
        AnygaugeError: it cannot be read.
    """
    try:
        launched = dict(json.loads((folder / LAUNCHED).read_text()))
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


def refuse_second(folder: Path) -> None:
    """A run that is still going must not have two jobs.

    Raises:
        AnygaugeError: an earlier job still waits or runs.
    """
    if not (folder / LAUNCHED).exists():
        return
    earlier = find_job(folder)
    if earlier.alive is not False:
        raise AnygaugeError(
            f"{folder} has a job already: {earlier.status()}. To follow it: anygauge job follow "
            f"{folder}; to end it: anygauge job cancel {folder}"
        )
