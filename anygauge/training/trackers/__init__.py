"""Announces the trackers that come with anygauge, as any plugin announces its own. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from anygauge.interface import API_VERSION, TrackerSpec, hookimpl
from anygauge.training.trackers.services import mlflow_store, wandb_login

_SERVICES = "anygauge.training.trackers.services"


def _tracker(name: str, kind: str, package: str = "", **more: Any) -> TrackerSpec:
    def missing() -> str | None:
        if package and importlib.util.find_spec(package) is None:
            install = f"pip install 'anygauge[{package}]'"
            return f"the package {package} is not installed; {install}"
        return None

    factory = f"{_SERVICES}:{kind}"
    return TrackerSpec(name=name, factory=factory, api_version=API_VERSION, missing=missing, **more)


@hookimpl
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:
    """Announce the trackers of this package."""
    jsonl, wandb, mlflow = (f"{_SERVICES}:{n}Options" for n in ("JsonLines", "Wandb", "MLflow"))
    return [
        _tracker("tensorboard", "TensorBoard", "tensorboard"),
        _tracker("jsonl", "JsonLinesFile", options=jsonl),
        _tracker("wandb", "WeightsAndBiases", "wandb", options=wandb, unready=wandb_login),
        _tracker("mlflow", "MLflow", "mlflow", options=mlflow, unready=mlflow_store),
    ]
