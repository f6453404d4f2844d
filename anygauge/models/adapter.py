"""LoRA through peft: adding it, saving it in peft's own layout, and checking what was saved."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config.schema import AdapterSection
from anygauge.interface import ModelError
from anygauge.interface.files import replaced, write_text

ADAPTER_NAME = "default"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def add_adapter(
    model: nn.Module, section: AdapterSection, *, dtype: torch.dtype, seed: int
) -> nn.Module:
    """Freeze the base and add LoRA factors in `dtype`, drawn from `seed` on the host.

    Raises:
        ModelError: no layer matches the targets; names layers that are there.
    """
    from peft import LoraConfig, get_peft_model

    check_targets(model, section.targets)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            # The host's generator alone: torch.manual_seed would reset the devices' as well.
            torch.default_generator.manual_seed(seed)
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"adapter: peft refused targets {section.targets!r}: {str(error).splitlines()[0]} "
            f"Linear layers here: {', '.join(linear_names(model))}; or use all-linear"
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def check_targets(model: nn.Module, targets: str | list[str]) -> None:
    """Refuse targets that match nothing, before peft does so less clearly."""
    if isinstance(targets, str):
        return
    linear = linear_names(model)
    names = {name for name, _ in model.named_modules()}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = difflib.get_close_matches(target, linear, 1)
            raise ModelError(
                f"adapter.targets: no layer is called {target!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" Linear layers here: {', '.join(linear)}; or use all-linear"
            )


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all linear layers."""
    return sorted(
        {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    )


def adapter_state(model: Any, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trained tensors under the names that peft stores.

    Raises:
        ModelError: the result is empty, which is how sharded parameters show when saved wrongly.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        model, state_dict=dict(trained), adapter_name=ADAPTER_NAME, save_embedding_layers=False
    )
    if not state or any(tensor.numel() == 0 for tensor in state.values()):
        raise ModelError(
            f"the adapter to save is empty ({len(state)} tensors): nothing was written"
        )
    return {name: tensor.contiguous() for name, tensor in state.items()}


def save_adapter(
    model: Any, trained: Mapping[str, Tensor], folder: Path, *, base: str | None
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``; read the latter back.

    Args:
        base: what the adapter was trained on, as users would name it.

    Raises:
        ModelError: what was read back is not what was written.
    """
    from safetensors.torch import load_file, save_file

    state = adapter_state(model, trained)
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / WEIGHTS_FILE) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
        back = load_file(temporary)
        if back.keys() != state.keys() or any(
            not torch.equal(back[name], tensor) for name, tensor in state.items()
        ):
            raise ModelError(f"{folder / WEIGHTS_FILE}: reading back gave other values; disk full?")
    config = model.peft_config[ADAPTER_NAME]
    config.base_model_name_or_path = base
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as temporary_folder:
        config.save_pretrained(temporary_folder)
        text = (Path(temporary_folder) / CONFIG_FILE).read_text()
    write_text(folder / CONFIG_FILE, text)


def load_adapter(model: nn.Module, folder: Path) -> Any:
    """The model with a saved adapter, for generation or merging.

    Raises:
        ModelError: the folder holds no adapter, or one of another model.
    """
    from peft import PeftModel

    missing = [f for f in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / f).is_file()]
    if missing:
        raise ModelError(
            f"{folder} is no adapter folder: {', '.join(missing)} is missing. A run writes its "
            "adapter to <output>/<name>/adapter"
        )
    try:
        return PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    except Exception as error:
        raise ModelError(
            f"the adapter in {folder} does not fit this model: {str(error).splitlines()[0]}"
        ) from error
