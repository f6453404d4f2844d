"""Finds the checkpoint that a run goes on from, and checks that it is of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Collectives, RunFileError
from anygauge.training.checkpoints.files import Checkpoint, complaint_about
from anygauge.training.checkpoints.keeper import FOLDER, checkpoints_in

NEVER, AUTO = "never", "auto"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        checkpoint: None to begin from the start.
        passed_over: checkpoints that are torn or altered, each with what is wrong with it.
    """

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()


def find_checkpoint(
    resume: str, run_directory: Path, rank: int, collectives: Collectives
) -> Resumed:
    """The checkpoint that ``checkpoint.resume`` asks for; every rank calls it and gets the same.

    Rank 0 alone reads and sums the files.

    Args:
        resume: ``never``, ``auto`` (the newest sound one in `run_directory`) or a folder.

    Raises:
        AnygaugeError: a folder was named, and is no sound checkpoint.
    """
    if resume == NEVER:
        return Resumed(None)
    mine = None
    if rank == 0:
        found, passed_over, failure = _search(resume, run_directory)
        mine = [None if found is None else str(found), passed_over, failure]
    folder, passed_over, failure = collectives.gather_objects(mine)[0]
    if failure is not None:
        raise AnygaugeError(failure)
    return Resumed(None if folder is None else Checkpoint(Path(folder)), tuple(passed_over))


def _search(resume: str, run_directory: Path) -> tuple[Path | None, tuple[str, ...], str | None]:
    """(folder, what was passed over, why nothing can be resumed)."""
    passed_over: list[str] = []
    if resume != AUTO:
        folder = Path(resume)
        complaint = complaint_about(folder)
        if complaint is None:
            return folder, (), None
        inside = checkpoints_in(folder) or checkpoints_in(folder.parent)
        hint = f"; checkpoints near it: {', '.join(map(str, inside))}" if inside else ""
        return None, (), f"--resume {folder} is no sound checkpoint: {complaint}{hint}"
    for folder in checkpoints_in(run_directory):
        complaint = complaint_about(folder)
        if complaint is None:
            return folder, tuple(passed_over), None
        passed_over.append(f"{FOLDER}/{folder.name} is passed over: {complaint}")
    return None, tuple(passed_over), None


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run: the losses would not be what either would have given.

    Args:
        identity: name -> value of all that fixes the learning curve before the first step.

    Raises:
        RunFileError: names what differs, and both values.
    """
    kept = checkpoint.record["identity"]
    different = [
        f"{name} (checkpoint: {_short(kept.get(name))}; now: {_short(value)})"
        for name, value in identity.items()
        if kept.get(name) != value
    ]
    if different:
        raise RunFileError(
            f"{checkpoint.folder} belongs to another run: {'; '.join(different)}. Give the run "
            "file that it was made with, or another name to begin anew"
        )


def changed_settings(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[str]:
    """Fields that may change when a run is resumed, and did: ``field: before -> now``."""
    kept = checkpoint.record["settings"]
    names = sorted({*kept, *settings})
    return [
        f"{name}: {_short(kept.get(name))} -> {_short(settings.get(name))}"
        for name in names
        if kept.get(name) != settings.get(name)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
