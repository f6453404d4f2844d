"""Finds the checkpoint that a run goes on from, and checks that it is of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Collectives
from anygauge.training.checkpoints.files import Checkpoint
from anygauge.training.checkpoints.finished import (
    Finished,
    FinishedError,
    check_length,
    finished_run,
)
from anygauge.training.checkpoints.identity import changed_settings, check_same_run
from anygauge.training.checkpoints.sound import (
    FOLDER,
    checkpoints_in,
    complaint_about,
    refusal_of,
    set_aside,
    shown,
    step_of,
)

NEVER, AUTO = "never", "auto"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        checkpoint: None to begin from the start.
        passed_over: checkpoints that are torn or altered, each with what is wrong with it.
        finished: the run, if it is done already.
    """

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()
    finished: Finished | None = None


def find_checkpoint(
    resume: str, run_directory: Path, rank: int, collectives: Collectives
) -> Resumed:
    """The checkpoint that ``checkpoint.resume`` asks for; every rank calls it and gets the same.

    Rank 0 alone looks for it, and sums the files.

    Args:
        resume: ``never``, ``auto`` (the newest sound one in `run_directory`) or a folder.

    Raises:
        AnygaugeError: a folder was named, and is not a sound checkpoint.
    """
    if resume == NEVER:
        return Resumed(None)
    mine = _search(resume, run_directory) if rank == 0 else None
    folder, passed_over, failure, report = collectives.gather_objects(mine)[0]
    if failure is not None:
        raise AnygaugeError(failure)
    return Resumed(
        None if folder is None else Checkpoint(Path(folder)),
        tuple(passed_over),
        None if report is None else Finished(folder=run_directory, report=report),
    )


def _search(resume: str, run_directory: Path) -> list[Any]:
    """[folder, what was passed over, why nothing can be resumed, report of a finished run]."""
    passed_over: list[str] = []
    if resume != AUTO:
        refusal = refusal_of(Path(resume))
        return [resume if refusal is None else None, [], refusal, None]
    done = finished_run(run_directory)
    report = None if done is None else dict(done.report)
    found = [*checkpoints_in(run_directory), *set_aside(run_directory)]
    for folder in sorted(found, key=lambda path: step_of(shown(path)) or 0, reverse=True):
        complaint = complaint_about(folder)
        if complaint is None:
            return [str(folder), passed_over, None, report]
        passed_over.append(f"{FOLDER}/{folder.name} is passed over: {complaint}")
    return [None, passed_over, None, report]


def check_resumed(
    resumed: Resumed, identity: Mapping[str, Any], settings: Mapping[str, Any], steps: int
) -> list[str]:
    """Accept what was found as a part of this run; returns which settings have changed since.

    Args:
        identity: see `identity_of`.
        settings: see `settings_of`.
        steps: of the whole run, now.

    Raises:
        RunFileError: it is part of another run, or what it was left as cannot be gone on with.
        FinishedError: the run is done.
    """
    start, finished = resumed.checkpoint, resumed.finished
    if finished is not None:
        if finished.identity:
            check_same_run(finished.folder, finished.identity, identity)
        if check_length(finished, steps, None if start is None else start.step):
            raise FinishedError(finished)
    if start is None:
        return []
    check_same_run(start.folder, start.record["identity"], identity)
    return changed_settings(start.record["settings"], settings)
