"""FP8 on Gaudi: linear layers of Intel's Transformer Engine in place of torch's.

Intel publishes no source of that library. What is used of it here, and how, is public: Intel's page
on FP8 training, the bridge's tests (gaudi-pytorch-bridge 1.19.0,
tests/pytest_working/any_mode/test_hpu_fp8_te.py) and optimum-habana 1.21.2
(accelerate/utils/transformer_engine.py, transformers/trainer.py), whose order is kept.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from anygauge.interface import Level, Support, UnsupportedError

if TYPE_CHECKING:
    from torch import nn

LIBRARY = "intel_transformer_engine"
ENGINE = "habana_frameworks.torch.hpex.experimental.transformer_engine"
"""The library by the name that the bridge gives it, as in optimum-habana: it is the same in all
releases."""

RECIPE = {
    "margin": 0,
    "interval": 16,
    "fp8_format": "HYBRID",
    "amax_compute_algo": "most_recent",
    "amax_history_len": 1,
    "reduce_amax": False,
}
"""How scales are found: optimum-habana's defaults (accelerate/utils/dataclasses.py). E4M3 in
forward and E5M2 in backward; each rank measures for itself, and takes new scales at every 16th call
of a layer."""


def fp8_support(*, installed: bool) -> Support:
    """Args: installed: whether Gaudi's software is, on this machine."""
    if installed and importlib.util.find_spec(LIBRARY) is None:
        return Support(
            Level.UNSUPPORTED_BY_VERSION,
            f"Intel's package {LIBRARY} is not installed; its container images have it",
        )
    return Support(
        Level.PARTIAL,
        "by Intel's Transformer Engine, as optimum-habana uses it; coarser numbers, not tried on a "
        "card, and none of the first generation has it",
    )


def train_in_fp8(
    model: nn.Module, kept: Collection[nn.Module], reentrant: bool | None
) -> Callable[[], AbstractContextManager[Any]]:
    """As `Backend.fp8_products`: Intel's layers in place of torch's.

    Raises:
        UnsupportedError: layers recompute by torch's newer form, the card or its software has no
            FP8, or the model no layer for it.
    """
    if reentrant is False:
        raise UnsupportedError(
            "precision.fp8: Intel tests it with torch's reentrant form of recomputation alone. Use "
            "strategy: {name: zero, reentrant: true}, or set train.gradient_checkpointing: false"
        )
    engine = _load_engine()
    # In optimum-habana's order (trainer.py): first recomputation, then accelerate converts.
    if reentrant:
        _signal_recomputation(model, engine)
    # Kept from forward to backward, all layers in FP8 would be a whole model on each card.
    _convert(model, kept, engine, minimize_memory=reentrant is None)
    given = {**RECIPE, "fp8_format": getattr(engine.recipe.Format, str(RECIPE["fp8_format"]))}
    recipe = engine.recipe.DelayedScaling(**given)
    return functools.partial(engine.fp8_autocast, enabled=True, fp8_recipe=recipe)


def _load_engine() -> Any:
    """Intel's library, on a card that can.

    Raises:
        UnsupportedError: the library is missing, or the card is of the first generation.
    """
    try:
        engine = importlib.import_module(ENGINE)
        for module in ("recipe", "distributed"):
            importlib.import_module(f"{ENGINE}.{module}")
    except ImportError as error:
        raise UnsupportedError(
            f"precision.fp8: Intel's Transformer Engine cannot be imported: {error}. Intel's "
            "container images have it; or set precision.fp8: false"
        ) from error
    # As accelerate asks (utils/imports.py, is_habana_gaudi1).
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    if experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi:
        raise UnsupportedError(
            "precision.fp8: this card is a Gaudi of the first generation, which has no FP8. Set "
            "precision.fp8: false"
        )
    return engine


def _signal_recomputation(model: nn.Module, engine: Any) -> None:
    """Let layers know that they are computed twice, so that both times have the same scales.

    Args:
        model: whose layers already recompute.
    """

    def signalling(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(checkpoint)
        def checkpointed(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
            signalled = engine.distributed.activation_checkpointing()(function)
            return checkpoint(signalled, *args, **named)

        return checkpointed

    layers: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer._gradient_checkpointing_func = signalling(layer._gradient_checkpointing_func)


def _convert(
    model: nn.Module, kept: Collection[nn.Module], engine: Any, *, minimize_memory: bool
) -> None:
    """Put the library's layers in the place of torch's, over the same parameters.

    Of a LoRA layer the frozen product alone is converted: the factors are too small to gain.

    Args:
        kept: modules to leave as they are, with all in them.
        minimize_memory: forward keeps no weight in FP8 for backward, which converts it again.

    Raises:
        UnsupportedError: there is none to replace.
    """
    places = list(_places(model, {id(each) for each in kept}))
    for parent, name, layer in places:
        converted = engine.Linear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=layer.weight.dtype,
            skip_weight_param_allocation=True,
            minimize_memory=minimize_memory,
        )
        converted.weight = layer.weight
        if layer.bias is not None:
            converted.bias = layer.bias
        converted.train(layer.training)
        setattr(parent, name, converted)
    if not places:
        raise UnsupportedError(
            f"precision.fp8: {type(model).__name__} has no torch.nn.Linear outside of its output "
            "layer, so that nothing would be computed in FP8. Set precision.fp8: false"
        )


def _places(model: nn.Module, kept: Collection[int]) -> Iterator[tuple[nn.Module, str, Any]]:
    from peft.tuners.lora import Linear as LoraLinear
    from torch import nn

    for name, child in model.named_children():
        if id(child) in kept:
            continue
        if isinstance(child, LoraLinear):
            if type(child.base_layer) is nn.Linear and id(child.base_layer) not in kept:
                yield child, "base_layer", child.base_layer
        elif type(child) is nn.Linear:
            yield model, name, child
        else:
            yield from _places(child, kept)
