"""A saved adapter as the start of a new one: what it decides, what is refused, its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.config.schema import AdapterSection
from anygauge.interface import HOST_DEVICE, ModelError, UnsupportedError
from anygauge.models.files import read_header
from anygauge.models.targets import Factors

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

KEPT = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *(
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "layers_to_transform",
        "layers_pattern",
    ),
    *("fan_in_fan_out", "task_type"),
}
"""What a saved configuration decides."""

IGNORED = {
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
}
"""What says nothing of the trained function, or only together with a field that is refused."""

SOUND_STARTS = (True, False, "gaussian", "orthogonal")
"""Initial values that leave the base's weights as they are; a saved adapter holds the rest."""


def refuse_no_adapter(folder: Path) -> None:
    """Refuse a folder that lacks one of an adapter's two files.

    Raises:
        ModelError: names what is missing.
    """
    missing = [file for file in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / file).is_file()]
    if missing:
        raise ModelError(
            f"{folder} is not an adapter folder: {', '.join(missing)} is missing. A run writes its "
            "adapter to <output>/<name>/adapter"
        )


def read_config(folder: Path, *, dropout: float) -> Any:
    """peft's configuration of a saved adapter, to be trained on.

    Args:
        dropout: of this run; it is not part of what was trained.

    Raises:
        ModelError: there is no adapter, or its configuration cannot be read.
        UnsupportedError: it is of a kind that is not trained here; names the field.
    """
    from peft import LoraConfig

    refuse_no_adapter(folder)
    path = folder / CONFIG_FILE
    try:
        fields = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is not JSON of an adapter's configuration: {error}") from error
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"adapter.start_from: {folder} is a {kind} adapter; anygauge trains only LORA adapters"
        )
    _refuse_other_kinds(fields, LoraConfig(), folder)
    kept = {name: value for name, value in fields.items() if name in KEPT}
    try:
        return LoraConfig(**kept, bias="none", lora_dropout=dropout)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: peft refused it: {str(error).splitlines()[0]}") from error


def _refuse_other_kinds(fields: Mapping[str, Any], usual: Any, folder: Path) -> None:
    for name, value in fields.items():
        if name in KEPT or name in IGNORED:
            continue
        if name == "init_lora_weights":
            sound = value in SOUND_STARTS
        else:
            # A field that this peft does not know matters only if it is set.
            sound = not value or value == getattr(usual, name, None)
        if not sound:
            raise UnsupportedError(
                f"adapter.start_from: {folder / CONFIG_FILE} sets {name}: {json.dumps(value)}, "
                "which anygauge does not train. First merge that adapter into its base with peft, "
                "then train a new one on the result"
            )


def check_given(
    section: AdapterSection,
    config: Any,
    asked: Mapping[str, Factors] | None,
    built: Mapping[str, Factors],
    folder: Path,
) -> None:
    """Refuse fields of the run file that say something else than the saved adapter.

    Args:
        asked: layers that the run file names, or None where it leaves them to the adapter.
        built: layers that the adapter has.

    Raises:
        ModelError: names the field and both values.
    """
    saved = {
        "r": config.r,
        "alpha": config.lora_alpha,
        "rslora": config.use_rslora,
        "dora": config.use_dora,
    }
    for name, value in saved.items():
        if name in section.given and getattr(section, name) != value:
            raise _differs(f"adapter.{name}", getattr(section, name), value, folder)
    if asked is None:
        return
    if asked.keys() != built.keys():
        only_asked = sorted(asked.keys() - built.keys())
        only_built = sorted(built.keys() - asked.keys())
        raise _differs(
            "adapter.targets",
            f"{len(asked)} layers" + (f" (with {only_asked[0]})" if only_asked else ""),
            f"{len(built)}" + (f" (with {only_built[0]})" if only_built else ""),
            folder,
        )
    for name in asked if "groups" in section.given else ():
        if asked[name] != built[name]:
            raise _differs(
                "adapter.groups",
                f"rank {asked[name].rank}, alpha {asked[name].alpha:g} for {name}",
                f"rank {built[name].rank}, alpha {built[name].alpha:g}",
                folder,
            )


def _differs(field: str, given: object, saved: object, folder: Path) -> ModelError:
    return ModelError(
        f"{field} is {given}, but the adapter to start from has {saved} ({folder}); leave the "
        "field out: the saved adapter decides it"
    )


def fill(adapted: Any, folder: Path, adapter_name: str, *, values: bool) -> None:
    """Give the trained parameters the saved tensors' values, in the parameters' own type.

    Args:
        values: False only checks that the saved tensors fit, by the file's header.

    Raises:
        ModelError: names or shapes are not those of this model's adapter, or a value is NaN.
    """
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    path = folder / WEIGHTS_FILE
    shapes = read_header(path)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    # The values pass through unchanged: this is peft's map from its file's names to parameters.
    places = get_peft_model_state_dict(
        adapted, state_dict=trained, adapter_name=adapter_name, save_embedding_layers=False
    )
    if shapes.keys() != places.keys():
        lacking, strange = sorted(places.keys() - shapes.keys()), sorted(shapes.keys() - places)
        raise ModelError(
            f"{path} does not fit this model: "
            + (f"{len(lacking)} tensors are missing, first {lacking[0]!r}; " if lacking else "")
            + (f"{len(strange)} belong to no layer, first {strange[0]!r}; " if strange else "")
            + "start from an adapter of this base"
        )
    for name, parameter in places.items():
        if shapes[name] != tuple(parameter.shape):
            raise ModelError(
                f"{path}: tensor {name!r} has shape {shapes[name]}, but this model needs "
                f"{tuple(parameter.shape)}; start from an adapter of this base"
            )
    if not values:
        return
    try:
        saved = load_file(path, device=HOST_DEVICE)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as tensors ({error}); is it whole? Fetch it again"
        ) from error
    with torch.no_grad():
        for name, parameter in places.items():
            if not saved[name].isfinite().all():
                raise ModelError(f"{path}: tensor {name!r} holds values that are not numbers")
            parameter.copy_(saved[name])
