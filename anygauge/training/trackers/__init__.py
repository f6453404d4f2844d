"""Announces the trackers that come with anygauge, as any plugin announces its own. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from anygauge.interface import API_VERSION, TrackerSpec, hookimpl
from anygauge.training.trackers.tracker_options import mlflow_store, wandb_login

_EXTRAS = ("tensorboard", "wandb", "mlflow")
"""Libraries that anygauge has an extra for, which bounds their versions."""


def _tracker(name: str, kind: str, package: str = "", **more: Any) -> TrackerSpec:
    def missing() -> str | None:
        if package and importlib.util.find_spec(package) is None:
            install = f"'anygauge[{package}]'" if package in _EXTRAS else package
            return f"the package {package} is not installed; pip install {install}"
        return None

    return TrackerSpec(
        name=name,
        factory=f"{__name__}.services:{kind}",
        api_version=API_VERSION,
        missing=missing,
        **more,
    )


def _options(kind: str) -> str:
    return f"{__name__}.tracker_options:{kind}Options"


@hookimpl
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:
    """Announce the trackers of this package."""
    wandb = {"options": _options("Wandb"), "unready": wandb_login}
    mlflow = {"options": _options("MLflow"), "unready": mlflow_store}
    service = {"options": _options("Service")}
    return [
        _tracker("tensorboard", "TensorBoard", "tensorboard"),
        _tracker("jsonl", "JsonLinesFile", options=_options("JsonLines")),
        _tracker("wandb", "WeightsAndBiases", "wandb", **wandb),
        _tracker("mlflow", "MLflow", "mlflow", **mlflow),
        _tracker("trackio", "Trackio", "trackio", **service),
        _tracker("swanlab", "SwanLab", "swanlab", **service),
        _tracker("comet_ml", "Comet", "comet_ml", **service),
        _tracker("aim", "Aim", "aim", **service),
        _tracker("clearml", "ClearML", "clearml", **service),
        _tracker("dvclive", "DVCLive", "dvclive", **service),
    ]
