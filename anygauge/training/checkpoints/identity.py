"""What fixes a run's learning curve, and what may change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from anygauge.config.renamed import translated_record
from anygauge.config.schema import RunFile
from anygauge.interface import RunFileError
from anygauge.models.quantisation import quantisation

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a model's configuration that say nothing of its architecture."""

_FREE_IN_ADAPTER = ("dropout", "start_from", "verify")

_SINCE_IN_ADAPTER = ("init", "target_parameters", "modules_to_save")
"""Fields that checkpoints of earlier versions do not speak of."""

_MAY_CHANGE = ("model", "adapter", "train", "precision", "strategy", "backend", "launch")


def identity_of(run: RunFile, architecture: Mapping[str, Any], data: str) -> dict[str, Any]:
    """What a resumed run must have in common with the one that made the checkpoint.

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
    """The part of it that stands in the run file."""
    adapter = None
    if run.adapter is not None:
        fields = type(run.adapter).model_fields
        usual = {
            name
            for name in _SINCE_IN_ADAPTER
            if getattr(run.adapter, name) == fields[name].get_default(call_default_factory=True)
        }
        adapter = run.adapter.model_dump(mode="json", exclude={*_FREE_IN_ADAPTER, *usual})
    asked = quantisation(run.model)
    return {
        "adapter": adapter,
        "model.new_tokens": [
            tokens for tokens in (run.model.new_tokens, run.model.new_special_tokens) if tokens
        ]
        or None,
        "model.quantise": None if asked is None else asked.model_dump(mode="json"),
        "train.trainable": run.train.trainable or None,
        "train.frozen": run.train.frozen or None,
        "train.seed": run.train.seed,
        "train.global_batch_size": run.train.global_batch_size,
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


def usual_settings(run: RunFile) -> dict[str, Any]:
    """What the same fields would be if the run file left them out, where they may be left out."""
    found: dict[str, Any] = {}

    def collect(section: BaseModel, path: str) -> None:
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                collect(value, f"{path}.{name}")
            elif not field.is_required():
                found[f"{path}.{name}"] = field.get_default(call_default_factory=True)

    for name in _MAY_CHANGE:
        if isinstance(section := getattr(run, name), BaseModel):
            collect(section, name)
    return found


def check_same_run(folder: Path, kept: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse another run: the losses would not be what either would have given.

    Args:
        folder: what is refused.
        kept: name -> value of all that fixes its learning curve before the first step.
        identity: the same of this run, or a part of it.

    Raises:
        RunFileError: names what differs, and both values.
    """
    kept = translated_record(kept)
    different = [
        f"{name} (before: {_short(kept.get(name))}; now: {_short(value)})"
        for name, value in identity.items()
        if kept.get(name) != value
    ]
    if different:
        raise RunFileError(
            f"{folder} belongs to another run: {'; '.join(different)}. Give the run file that it "
            "was made with, or another name to begin anew"
        )


def changed_settings(
    kept: Mapping[str, Any], settings: Mapping[str, Any], usual: Mapping[str, Any]
) -> list[str]:
    """Fields that may change when a run is resumed, and did: ``field: before -> now``.

    Args:
        kept: of the run before; a field that there was not yet had its usual value.
        settings: of this run; see `settings_of`.
        usual: see `usual_settings`.
    """
    new = {name: usual[name] for name in settings if name in usual}
    kept = {**new, **translated_record(kept)}
    # What another strategy had besides is not a field of this one.
    gone = {name for name in kept.keys() - settings.keys() if name.startswith("strategy.")}
    names = sorted({*kept, *settings} - gone)
    return [
        f"{name}: {_short(kept.get(name))} -> {_short(settings.get(name))}"
        for name in names
        if kept.get(name) != settings.get(name)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
