"""Announces the trackers that come with anygauge, as any plugin announces its own. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

from anygauge.interface import API_VERSION, TrackerSpec, hookimpl
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
            options=f"{_SERVICES}:JsonLinesOptions",
        ),
        TrackerSpec(
            name="wandb",
            factory=f"{_SERVICES}:WeightsAndBiases",
            api_version=API_VERSION,
            options=f"{_SERVICES}:WandbOptions",
            missing=_needs("wandb", "pip install 'anygauge[wandb]'"),
            unready=wandb_login,
        ),
        TrackerSpec(
            name="mlflow",
            factory=f"{_SERVICES}:MLflow",
            api_version=API_VERSION,
            options=f"{_SERVICES}:MLflowOptions",
            missing=_needs("mlflow", "pip install 'anygauge[mlflow]'"),
            unready=mlflow_store,
        ),
    ]
