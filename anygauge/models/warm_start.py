"""A saved adapter as the start of a new one: what it decides, what is refused, its tensors."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.config.schema import AdapterSection
from anygauge.interface import HOST_DEVICE, ModelError, UnsupportedError
from anygauge.models.factors import SCALE_FIELDS, Factors, scale_factors, with_plain_scale
from anygauge.models.model_files import check_folder, not_finite, read_fields, read_header
from anygauge.models.vocabulary import NewTokens, listed_rows, trained_rows
from anygauge.util.text import first_line

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

SAVED_FIELDS = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("modules_to_save", "trainable_token_indices", "fan_in_fan_out", "task_type"),
    *("target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern"),
}
"""What a saved configuration decides."""

OTHER_FIELDS = {
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
}
"""What says nothing of the trained function, or only together with a field that is refused."""

SOUND_STARTS = (True, False, "gaussian", "orthogonal")
"""Initial values that leave the base's weights as they are; a saved adapter holds the rest."""

TRAINED_AS = "anygauge"
"""Key of the weights' metadata: the fields of the configuration that `with_plain_scale` changed."""


def refuse_no_adapter(folder: Path) -> None:
    """Refuse a folder that lacks one of an adapter's two files.

    Raises:
        ModelError: names what is missing.
    """
    missing = [file for file in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / file).exists()]
    if missing:
        raise ModelError(
            f"{folder} is not an adapter folder: {', '.join(missing)} is missing. A run writes its "
            "adapter to <output>/<name>/adapter"
        )
    check_folder(folder)


def read_config(folder: Path, *, dropout: float) -> tuple[Any, bool]:
    """peft's configuration of a saved adapter, to be trained on.

    Args:
        dropout: of this run; it is not part of what was trained.

    Returns:
        The configuration, and whether it has another scale than the files: the one that the adapter
        was trained with (`with_plain_scale`).

    Raises:
        ModelError: there is no adapter, or its configuration cannot be read.
        UnsupportedError: it is of a kind that is not trained here; names the field.
    """
    from peft import LoraConfig

    refuse_no_adapter(folder)
    path = folder / CONFIG_FILE
    fields = read_fields(path)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"adapter.start_from: {folder} is a {kind} adapter; anygauge trains only LORA adapters"
        )
    _refuse_other_kinds(fields, LoraConfig(), path)
    kept = {name: value for name, value in fields.items() if name in SAVED_FIELDS}
    try:
        config = LoraConfig(**kept, bias="none", lora_dropout=dropout)
        trained = copy.copy(config)
        for name, value in _trained_as(folder / WEIGHTS_FILE).items():
            if name in SCALE_FIELDS:
                setattr(trained, name, value)
        plain, changed = with_plain_scale(trained)
        # Whoever has changed the configuration since means what it says.
        return (trained, True) if changed and config == plain else (config, False)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: peft refused it: {first_line(error)}") from error


def _trained_as(weights: Path) -> dict[str, Any]:
    """What `with_plain_scale` returned when the file was written; empty in others' files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:
            return dict(json.loads((file.metadata() or {}).get(TRAINED_AS, "{}")))
    except (OSError, SafetensorError):
        return {}  # `fill_adapter` says what is wrong with the file


def _refuse_other_kinds(fields: Mapping[str, Any], usual: Any, path: Path) -> None:
    for name in sorted(fields.keys() - SAVED_FIELDS - OTHER_FIELDS):
        value = fields[name]
        if name == "init_lora_weights":
            sound = value in SOUND_STARTS
        else:
            # A field that this peft does not know matters only if it is set.
            sound = not value or value == getattr(usual, name, None)
        if not sound:
            raise UnsupportedError(
                f"adapter.start_from: {path} sets {name}: {json.dumps(value)}, which anygauge does "
                "not train. First merge that adapter into its base with peft, then train a new one "
                "on the result"
            )


def check_given(
    section: AdapterSection,
    config: Any,
    planned: Mapping[str, Factors] | None,
    built: Mapping[str, Factors],
    folder: Path,
) -> None:
    """Refuse fields of the run file that contradict the saved adapter.

    Args:
        planned: layers that the run file names, or None where it leaves them to the adapter.
        built: layers that the adapter has.

    Raises:
        ModelError: names the field and both values.
    """
    saved = {
        "r": config.r,
        "alpha": config.lora_alpha,
        "rslora": config.use_rslora,
        "dora": config.use_dora,
        "modules_to_save": config.modules_to_save or [],
        "init": "trained factors",
    }
    different: dict[str, tuple[object, object]] = {
        f"adapter.{name}": (getattr(section, name), value)
        for name, value in saved.items()
        if name in section.own_fields and getattr(section, name) != value
    }
    if planned is not None:
        if "groups" not in section.own_fields:  # one rank and alpha for all, compared above
            planned = {name: built.get(name, factors) for name, factors in planned.items()}
        if (name := first_difference(planned, built)) is not None:
            different[f"adapter.targets or adapter.groups: layer {name}"] = (
                planned.get(name, "without factors"),
                built.get(name, "none"),
            )
    for field, (given, value) in different.items():
        raise ModelError(
            f"{field} is {given}, but the adapter to start from has {value} ({folder}); leave the "
            "field out: the saved adapter decides it"
        )


def first_difference(one: Mapping[str, Factors], other: Mapping[str, Factors]) -> str | None:
    """The first layer that has no factors, or others, in one of two plans."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


def whole_modules(section: AdapterSection | None) -> list[str]:
    """Ends of the names of modules that are trained whole: of the section, or its saved adapter.

    Raises:
        ModelError: the adapter to start from cannot be read.
    """
    if section is None or section.start_from is None:
        return [] if section is None else section.modules_to_save
    path = Path(section.start_from) / CONFIG_FILE
    if not path.exists():
        return []  # the ranks look on their machines
    return list(read_fields(path).get("modules_to_save") or [])


def check_rows(model: Any, config: Any, new: NewTokens | None, folder: Path) -> None:
    """Refuse new tokens that are not those whose rows the saved adapter has.

    Raises:
        ModelError: shows the numbers of both.
    """
    saved = listed_rows(config.trainable_token_indices)
    wanted: list[int] = []
    if new is not None and trained_rows(model, new, (), config.modules_to_save or ()):
        wanted = new.ids
    if saved != wanted:
        there, here = (f"{n[0]} to {n[-1]}" if n else "none" for n in (saved, wanted))
        raise ModelError(
            f"adapter.start_from: {folder} has trained rows of the tokens {there}, but the run's "
            f"new tokens are {here}. List model.new_tokens and model.new_special_tokens as the "
            "adapter's own run did, in the same order; to add tokens, first merge the adapter into "
            "its base (anygauge merge)"
        )


def fill_adapter(
    adapted: Any, folder: Path, adapter_name: str, *, values: bool, rescale: bool = False
) -> None:
    """Give the trained parameters the saved tensors' values, in the parameters' own type.

    Args:
        values: False only checks that the saved tensors fit, by the file's header.
        rescale: the files have the scale of `with_plain_scale`, the model that of its training.

    Raises:
        ModelError: names or shapes are not those of this model's adapter, or a value is NaN.
    """
    import torch
    from peft import get_peft_model_state_dict

    path = folder / WEIGHTS_FILE
    shapes = read_header(path)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    # The values pass through unchanged: this is peft's map from its file's names to parameters.
    places = get_peft_model_state_dict(
        adapted, state_dict=trained, adapter_name=adapter_name, save_embedding_layers=False
    )
    needed = {name: tuple(parameter.shape) for name, parameter in places.items()}
    different = sorted(name for name, _ in shapes.items() ^ needed.items())
    if different:
        first = different[0]
        raise ModelError(
            f"{path} does not fit this model: {len({*different})} tensors are missing, have "
            f"another shape or belong to no layer, first {first!r}: its shape is "
            f"{shapes.get(first, 'missing')}, but this model needs {needed.get(first, 'none')}; "
            "start from an adapter of this base"
        )
    if not values:
        return
    saved = read_tensors(path)
    factors = scale_factors(adapted, adapter_name) if rescale else {}
    with torch.no_grad():
        for name, parameter in places.items():
            parameter.copy_(saved[name] / factors.get(name, 1))


def read_tensors(path: Path) -> dict[str, Any]:
    """An adapter's tensors by name, on the host.

    Raises:
        ModelError: the file cannot be read, or a value in it is not a number.
    """
    from safetensors.torch import load_file

    try:
        saved = load_file(path, device=HOST_DEVICE)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as tensors ({error}); is it whole? Fetch it again"
        ) from error
    if (name := not_finite(saved.items())) is not None:
        raise ModelError(
            f"{path}: tensor {name!r} holds values that are not numbers, so the adapter cannot be "
            "used; take that of an earlier checkpoint, or train again"
        )
    return saved
