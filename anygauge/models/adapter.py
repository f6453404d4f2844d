"""LoRA through peft: adding it to a model, new or saved, and which other weights it reads."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config.schema import AdapterSection
from anygauge.interface import HOST_DEVICE, ModelError, UnsupportedError
from anygauge.models.adaptable_layers import (
    check_saved_modules,
    is_layer,
    patterns,
    peft_targets,
    planned_layers,
    planned_parameters,
)
from anygauge.models.factors import Factors, changes_base, check_init, to_int
from anygauge.models.vocabulary import NewTokens, row_layers, trained_rows
from anygauge.models.warm_start import (
    WEIGHTS_FILE,
    check_given,
    check_rows,
    fill_adapter,
    first_difference,
    read_config,
    read_tensors,
    refuse_no_adapter,
)
from anygauge.util.text import first_line

ADAPTER_NAME = "default"


def add_adapter(
    model: nn.Module,
    section: AdapterSection,
    *,
    dtype: torch.dtype,
    seed: int,
    new_tokens: NewTokens | None = None,
) -> nn.Module:
    """Freeze the base and add LoRA factors in `dtype`, drawn from `seed` on the host.

    A function of section, seed and base alone: equal on every rank and strategy. On a model whose
    parameters are on the meta device, the factors are there too. DoRA's magnitudes are norms of
    the base's weights: a strategy that shards them must let peft gather each.

    Args:
        new_tokens: whose rows are trained as well.

    Raises:
        ModelError: no layer matches the targets, or the adapter to start from cannot be used.
        UnsupportedError: the adapter to start from is of a kind that is not trained.
    """
    folder = None if section.start_from is None else Path(section.start_from)
    check_init(section.init)
    on_meta = any(p.is_meta for p in model.parameters())
    planned, rescale = None, False
    if folder is None or {"targets", "groups", "target_parameters"} & section.own_fields:
        planned = planned_layers(model, section) | planned_parameters(model, section)
    if folder is not None:
        config, rescale = read_config(folder, dropout=section.dropout)
        check_rows(model, config, new_tokens, folder)
    else:
        assert planned is not None
        check_saved_modules(model, section)
        config = lora_config(model, section, planned)
        if on_meta and changes_base(section.init):
            config.init_lora_weights = True  # there is nothing yet to take factors from
        if new_tokens is not None:
            config.trainable_token_indices = (
                trained_rows(model, new_tokens, planned, section.modules_to_save) or None
            )
    adapted = _with_factors(model, config, seed, on_meta, folder)
    if changes_base(section.init) and (name := _beside_factors(adapted)) is not None:
        raise UnsupportedError(
            f"adapter.init: {section.init} takes the factors of linear layers out of the base; to "
            f"save them beside the base as it was, nothing else may be trained, and {name!r} is. "
            "Leave out what trains it (dora, modules_to_save, new tokens, an embedding among the "
            "targets), or set adapter.init: true"
        )
    built = adapted_layers(adapted)
    if folder is not None:
        check_given(section, config, planned, built, folder)
    elif planned is not None and (name := first_difference(planned, built)) is not None:
        raise ModelError(
            "adapter: peft did not build the layers that the run file describes; the first that "
            f"differs is {name!r}"
        )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if folder is not None:
        fill_adapter(adapted, folder, ADAPTER_NAME, values=not on_meta, rescale=rescale)
    return adapted


def _beside_factors(adapted: nn.Module) -> str | None:
    """The first trained parameter that is not a factor of a linear layer."""
    factors = (f"lora_A.{ADAPTER_NAME}.weight", f"lora_B.{ADAPTER_NAME}.weight")
    trained = (name for name, p in adapted.named_parameters() if p.requires_grad)
    return next((name for name in trained if not name.endswith(factors)), None)


def lora_config(model: nn.Module, section: AdapterSection, plan: Mapping[str, Factors]) -> Any:
    """peft's configuration for layers that were settled before."""
    from peft import LoraConfig

    modules, parameters = peft_targets(model, plan)
    ranks = {name: factors.r for name, factors in plan.items()}
    alphas = {name: to_int(factors.alpha) for name, factors in plan.items()}
    return LoraConfig(
        r=section.r,
        lora_alpha=to_int(section.alpha),
        rank_pattern=patterns(ranks, section.r),
        alpha_pattern=patterns(alphas, section.alpha),
        use_rslora=section.rslora,
        use_dora=section.dora,
        lora_dropout=section.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        init_lora_weights=section.init,
        modules_to_save=section.modules_to_save or None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _with_factors(
    model: nn.Module, config: Any, seed: int, on_meta: bool, folder: Path | None
) -> nn.Module:
    from peft import get_peft_model

    try:
        with torch.random.fork_rng(devices=[]), _peft_quiet(), _rows_of_any_device():
            # The host's generator alone: torch.manual_seed would reset the devices' as well.
            torch.default_generator.manual_seed(seed)
            adapted: nn.Module = get_peft_model(
                model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=on_meta
            )
    except (ValueError, TypeError, RuntimeError) as error:
        where = "adapter" if folder is None else f"adapter.start_from: {folder}"
        raise ModelError(f"{where}: peft refused it: {first_line(error)}") from error
    return adapted


@contextlib.contextmanager
def _peft_quiet() -> Iterator[None]:
    """peft warns of what is settled here: Conv1D's layout, and tied embeddings (see `merge`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        yield


@contextlib.contextmanager
def _rows_of_any_device() -> Iterator[None]:
    """Let peft read rows of a sharded embedding wherever it lies: its own way is CUDA's alone."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.integrations import gather_params_ctx

    def collect(_: Any, weight: Tensor, rows: list[int], width: int) -> Tensor:
        with gather_params_ctx([weight], modifier_rank=None):
            return weight[rows].clone()

    usual = TrainableTokensLayer._collect_token_weights
    TrainableTokensLayer._collect_token_weights = collect
    try:
        yield
    finally:
        TrainableTokensLayer._collect_token_weights = usual


def _lora_layers(adapted: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            yield name.removeprefix("base_model.model."), module


def adapted_layers(adapted: nn.Module) -> dict[str, Factors]:
    """The layers and tensors that carry an adapter, by the names they had, and their factors."""
    found = {}
    for name, module in _lora_layers(adapted):
        name = name.replace(".base_layer", "")
        tensor = getattr(module, "parameter_name", None)
        if tensor is not None and not is_layer(module.get_base_layer()):
            name = f"{name}.{tensor}"
        found[name] = Factors(module.r[ADAPTER_NAME], float(module.lora_alpha[ADAPTER_NAME]))
    return found


def saved_modules(adapted: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Modules of the base, each with the copy that is trained in its place."""
    from peft.utils import ModulesToSaveWrapper

    return [
        (module.original_module, module.modules_to_save[ADAPTER_NAME])
        for module in adapted.modules()
        if isinstance(module, ModulesToSaveWrapper)
    ]


def external_parameters(adapted: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Parameters that a module reads in its forward though another owns them.

    DoRA's norm reads the base's weight and bias and both factors; an embedding's factors lie in a
    dictionary that is never called; trained rows are put into the embedding's weight by the layer
    around it. A strategy that releases weights must bring them back there.
    """
    found: list[tuple[nn.Module, nn.Parameter]] = []
    for _, layer in _lora_layers(adapted):
        factors = [
            *layer.lora_A.parameters(),
            *layer.lora_B.parameters(),
            *layer.lora_embedding_A.parameters(),
            *layer.lora_embedding_B.parameters(),
        ]
        if len(layer.lora_embedding_A):
            found += [(layer, parameter) for parameter in factors]
        if hasattr(layer, "parameter_name"):
            # It adds the factors' product to the tensor while the owner computes.
            found += [(layer, parameter) for parameter in (*factors, layer.get_param())]
        for norm in layer.lora_magnitude_vector.values():
            found += [(norm, p) for p in (*layer.get_base_layer().parameters(), *factors)]
    for _, rows in row_layers(adapted):
        found.append((rows, rows.base_layer.weight))
        found += [(rows, delta) for delta in rows.trainable_tokens_delta.values()]
    return found


def load_adapter(model: nn.Module, folder: Path) -> Any:
    """The model with a saved adapter, for generation, merging or verification.

    Raises:
        ModelError: the folder holds no adapter, or one of another model.
    """
    from peft import PeftModel

    refuse_no_adapter(folder)
    try:
        with _peft_quiet():
            # Adapters are saved with all of their tensors: one that is lacking was renamed by peft.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            # Named, so that peft does not look for a device of its own choice to read it into.
            adapted = PeftModel.from_pretrained(
                model, str(folder), autocast_adapter_dtype=False, torch_device=HOST_DEVICE
            )
    except Exception as error:
        raise ModelError(
            f"the adapter in {folder} does not fit this model: {first_line(error)}"
        ) from error
    read_tensors(folder / WEIGHTS_FILE)
    return adapted
