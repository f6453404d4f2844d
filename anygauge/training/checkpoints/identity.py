"""What fixes a run's learning curve, and what may change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from anygauge.config.schema import RunFile

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a model's configuration that say nothing of its architecture."""

_FREE_IN_ADAPTER = ("dropout", "start_from", "verify")

_MAY_CHANGE = ("model", "adapter", "train", "precision", "strategy", "backend", "launch")


def identity_of(run: RunFile, architecture: Mapping[str, Any], data: str) -> dict[str, Any]:
    """What a resumed run must have in common with the one that made the checkpoint.

    Args:
        architecture: the model's configuration.
        data: digest of rows and their order.
    """
    fields = {k: v for k, v in architecture.items() if k not in _VOLATILE}
    adapter = None
    if run.adapter is not None:
        adapter = run.adapter.model_dump(mode="json", exclude=set(_FREE_IN_ADAPTER))
    return {
        "model architecture": _digest(fields),
        "adapter": adapter,
        "data and its order": data,
        "train.seed": run.train.seed,
        "train.global_batch": run.train.global_batch,
        "train.optimizer.name": run.train.optimizer.name,
    }


def settings_of(run: RunFile) -> dict[str, Any]:
    """The fields that decide a result or how it is reached, by dotted path."""
    found: dict[str, Any] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, below in value.items():
                collect(below, f"{path}.{name}")
        else:
            found[path] = value

    values = run.model_dump(mode="json")
    for name in _MAY_CHANGE:
        collect(values[name], name)
    return found


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
