"""Announces the trackers that come with anygauge, as any plugin announces its own. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

from anygauge.interface import API_VERSION, TrackerOption, TrackerSpec, hookimpl
from anygauge.training.trackers.services import mlflow_store, wandb_login

_SERVICES = "anygauge.training.trackers.services"


def _needs(module: str, install: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        if importlib.util.find_spec(module) is None:
            return f"the package {module} is not installed; {install}"
        return None

    return missing


@hookimpl
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:
    """Announce the trackers of this package."""
    return [
        TrackerSpec(
            name="tensorboard",
            factory=f"{_SERVICES}:TensorBoard",
            api_version=API_VERSION,
            missing=_needs("tensorboard", "pip install 'anygauge[tensorboard]'"),
        ),
        TrackerSpec(
            name="jsonl",
            factory=f"{_SERVICES}:JsonLinesFile",
            api_version=API_VERSION,
            options=(
                TrackerOption(
                    name="path",
                    description="File to append to; a relative path is in the run directory.",
                    required=True,
                ),
            ),
        ),
        TrackerSpec(
            name="wandb",
            factory=f"{_SERVICES}:WeightsAndBiases",
            api_version=API_VERSION,
            options=(
                TrackerOption(name="project", description="Left out: WANDB_PROJECT, or anygauge."),
                TrackerOption(name="entity", description="User or team."),
                TrackerOption(name="name", description="Left out: the run's name."),
                TrackerOption(name="group", description="Group of runs."),
                TrackerOption(name="notes", description="Longer description."),
                TrackerOption(name="tags", description="Labels.", kind="list of text"),
                TrackerOption(
                    name="mode",
                    description="online, or offline to send the run later with `wandb sync`. Left "
                    "out: WANDB_MODE, or online.",
                    choices=("online", "offline"),
                ),
            ),
            missing=_needs("wandb", "pip install 'anygauge[wandb]'"),
            unready=wandb_login,
        ),
        TrackerSpec(
            name="mlflow",
            factory=f"{_SERVICES}:MLflow",
            api_version=API_VERSION,
            options=(
                TrackerOption(
                    name="tracking_uri",
                    description="Server or store. Left out: MLFLOW_TRACKING_URI.",
                ),
                TrackerOption(
                    name="experiment",
                    description="Created if missing. Left out: MLFLOW_EXPERIMENT_NAME, or "
                    "anygauge.",
                ),
                TrackerOption(name="name", description="Left out: the run's name."),
            ),
            missing=_needs("mlflow", "pip install 'anygauge[mlflow]'"),
            unready=mlflow_store,
        ),
    ]
