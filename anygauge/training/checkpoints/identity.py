"""Whether an earlier run is the one that is to be resumed, and whether it is finished already.

Its identity is what fixes the learning curve; settings may change when a run is resumed. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, RunFileError
from anygauge.models.quantization import quantization
from anygauge.training.checkpoints.sound import read_json
from anygauge.util.section import Count, Text
from anygauge.util.text import flatten_values, shorten

REPORT = "report.json"
_RESULTS = ("adapter", "model")
"""Names of the folder that holds what a run has trained."""

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a model's configuration that do not change its architecture."""

EARLY = "train.early_stopping"

_FREE_IN_ADAPTER = ("dropout", "start_from", "verify")

_MAY_CHANGE = ("model", "adapter", "train", "precision", "strategy", "backend", "launch")


def identity_of(run: RunFile, architecture: Mapping[str, Any], data: str) -> dict[str, Any]:
    """What a resumed run must have in common with the run that wrote the checkpoint.

    Args:
        architecture: the model's configuration.
        data: digest of rows and their order.
    """
    fields = {k: v for k, v in architecture.items() if k not in _VOLATILE}
    return {
        "model architecture": _digest(fields),
        "data and its order": data,
        **identity_of_file(run),
    }


def identity_of_file(run: RunFile) -> dict[str, Any]:
    """The part of the identity that the run file alone decides."""
    adapter = None
    if run.adapter is not None:
        adapter = run.adapter.model_dump(mode="json", exclude={*_FREE_IN_ADAPTER})
    asked = quantization(run.model)
    return {
        "adapter": adapter,
        "model.new_tokens": [
            tokens for tokens in (run.model.new_tokens, run.model.new_special_tokens) if tokens
        ]
        or None,
        "model.quantize": None if asked is None else asked.model_dump(mode="json"),
        "objective": [run.objective, run.objective_options] if run.objective_spec.pairs else None,
        "train.trainable": run.train.trainable or None,
        "train.frozen": run.train.frozen or None,
        "train.seed": run.train.seed,
        "train.global_batch_size": run.train.global_batch_size,
        "train.optimizer.name": run.train.optimizer.name,
    }


def settings_of(run: RunFile) -> dict[str, Any]:
    """The fields that decide a result or how it is reached, by dotted path."""
    return dict(flatten_values(run.model_dump(mode="json", include=set(_MAY_CHANGE))))


def check_same_run(folder: Path, kept: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse another run, whose losses would differ from the start.

    Args:
        folder: the run or checkpoint that may be refused.
        kept: its identity; see `identity_of`.
        identity: of this run, or a part of it.

    Raises:
        RunFileError: names what differs, and both values.
    """
    different = [
        f"{name} (before: {shorten(str(kept.get(name)))}; now: {shorten(str(value))})"
        for name, value in identity.items()
        if kept.get(name) != value
    ]
    if different:
        raise RunFileError(
            f"{folder} belongs to another run: {'; '.join(different)}. Use the run file that it "
            "was made with, or give another name to start a new run"
        )


def changed_settings(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Fields that may change when a run is resumed, and did: ``field: before -> now``.

    Options of a strategy that the other does not have are left out.

    Args:
        kept: of the run before.
        settings: of this run; see `settings_of`.
    """
    alone = {n for n in kept.keys() ^ settings.keys() if n.startswith("strategy.")}
    return [
        f"{name}: {shorten(str(kept.get(name)))} -> {shorten(str(settings.get(name)))}"
        for name in sorted((kept.keys() | settings.keys()) - alone)
        if kept.get(name) != settings.get(name)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A run that is finished, by its report.

    Attributes:
        folder: of the run.
        report: the contents of ``report.json``.
    """

    folder: Path
    report: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return int(self.report["steps"])

    @property
    def planned(self) -> int:
        """Steps of the whole run; its evaluations may have ended it before."""
        return int(self.report.get("planned_steps", self.steps))

    @property
    def result(self) -> Path:
        """The folder of the trained adapter or model."""
        return self.folder / Path(self.report["saved"]).name

    @property
    def identity(self) -> Mapping[str, Any]:
        """See `identity_of`; empty where the report does not have it."""
        kept = self.report.get("identity")
        return kept if isinstance(kept, dict) else {}

    @property
    def summary(self) -> dict[str, Any]:
        """The report as it was printed at the end of the run."""
        hidden = ("identity", "settings")
        return {name: value for name, value in self.report.items() if name not in hidden}

    def describe(self) -> str:
        """A line for the terminal."""
        done = f"this run has already finished after {self.steps} steps"
        return f"finished: {done}; result: {self.result}"


class FinishedError(AnygaugeError):
    """The run that ranks were to resume is finished: nothing is left to do, nothing is wrong."""

    def __init__(self, finished: FinishedRun) -> None:
        super().__init__(finished.describe())
        self.finished = finished


class _Report(BaseModel):
    """The part of a run's report that is read here."""

    steps: Count
    planned_steps: Count = 0
    saved: Text


def finished_run(run_directory: Path) -> FinishedRun | None:
    """The run of a folder, if it is finished: the report is what a run writes last."""
    try:
        report = read_json(run_directory / REPORT)
        saved = _Report.model_validate(report).saved
    except (AnygaugeError, ValidationError):
        return None
    if Path(saved).name not in _RESULTS:
        return None
    finished = FinishedRun(folder=run_directory, report=report)
    return finished if finished.result.is_dir() else None


def check_length(
    finished: FinishedRun, steps: int, newest: int | None, settings: Mapping[str, Any]
) -> bool:
    """Whether the run has all the steps that are wanted now; False if it can train on from its end.

    Args:
        steps: wanted now.
        settings: wanted now; see `settings_of`.
        newest: step of the newest sound checkpoint; None where there is none.

    Raises:
        RunFileError: it is longer than wanted; or it has no checkpoint of its last step, and would
            repeat steps from an earlier one.
    """
    changes = changed_settings(finished.report.get("settings", {}), settings)
    other_end = steps > finished.steps and any(each.startswith(EARLY) for each in changes)
    if steps == finished.planned and not other_end:
        return True
    where = f"{finished.folder} finished after {finished.steps} steps, and {steps} are requested"
    if steps < finished.steps:
        raise RunFileError(
            f"{where}: a finished run cannot be made shorter. Give another name to train {steps} "
            "steps from the beginning"
        )
    if newest is None or newest < finished.steps:
        kept = "it has none" if newest is None else f"its newest sound one is of step {newest}"
        advice = "" if newest is None else ", or to resume from that one (--resume CHECKPOINT)"
        raise RunFileError(
            f"{where}: a finished run can go on only from a checkpoint of its last step, but "
            f"{kept} (checkpoint.every). Give another name to train from the beginning{advice}"
        )
    return False


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
