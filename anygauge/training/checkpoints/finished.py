"""A run that is done: its report says so, and it is not trained again. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, RunFileError
from anygauge.training.checkpoints.sound import is_count, read_json

REPORT = "report.json"
RESULTS = ("adapter", "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What a finished run says of itself.

    Attributes:
        folder: of the run.
        report: what ``report.json`` holds.
    """

    folder: Path
    report: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return int(self.report["steps"])

    @property
    def result(self) -> Path:
        """The folder of what was trained."""
        return self.folder / Path(self.report["saved"]).name

    @property
    def identity(self) -> Mapping[str, Any]:
        """See `identity_of`; empty where the report does not have it."""
        return _object(self.report.get("identity"))

    @property
    def settings(self) -> Mapping[str, Any]:
        """See `settings_of`."""
        return _object(self.report.get("settings"))

    @property
    def summary(self) -> dict[str, Any]:
        """The report as the run's end showed it."""
        hidden = ("identity", "settings")
        return {name: value for name, value in self.report.items() if name not in hidden}

    def describe(self) -> str:
        """A line for the terminal."""
        return f"finished: this run was done before, {self.steps} steps; result: {self.result}"


class FinishedError(AnygaugeError):
    """The run that ranks were to go on with is done: nothing is left to do, and nothing wrong."""

    def __init__(self, finished: Finished) -> None:
        super().__init__(finished.describe())
        self.finished = finished


def finished_run(run_directory: Path) -> Finished | None:
    """The run of a folder, if it is done: the report is what a run writes last."""
    try:
        report = read_json(run_directory / REPORT)
    except AnygaugeError:
        return None
    saved = report.get("saved")
    if not is_count(report.get("steps")) or not isinstance(saved, str):
        return None
    if Path(saved).name not in RESULTS:
        return None
    finished = Finished(folder=run_directory, report=report)
    return finished if finished.result.is_dir() else None


def check_length(finished: Finished, steps: int, newest: int | None) -> bool:
    """Whether the run is as long as is wanted now; False if it may go on from its end.

    Args:
        steps: wanted now.
        newest: step of the newest sound checkpoint; None where there is none.

    Raises:
        RunFileError: it is longer than wanted; or it keeps no checkpoint of its end, and going on
            would train again from an earlier one what is done already.
    """
    if steps == finished.steps:
        return True
    where = f"{finished.folder} is finished after {finished.steps} steps, and {steps} are asked for"
    if steps < finished.steps:
        raise RunFileError(
            f"{where}: a finished run is not made shorter. Give another name to train {steps} "
            "steps from the beginning"
        )
    if newest is None or newest < finished.steps:
        kept = "it keeps none" if newest is None else f"its newest sound one is of step {newest}"
        advice = "" if newest is None else ", or to resume from that one (--resume CHECKPOINT)"
        raise RunFileError(
            f"{where}: it can resume from a checkpoint of its last step alone, and {kept} "
            f"(checkpoint.every). Give another name to train from the beginning{advice}"
        )
    return False


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
