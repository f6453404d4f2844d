"""Layers of a transformers model that recompute their activations in backward."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from anygauge.interface import Activations, UnsupportedError
from anygauge.kernels.loss import base_of

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Torch's matrix products, and which argument is the first factor."""

CHEAP_RATIO = 8
"""A product of (m, k) and (k, n) is made again where n is more than so many times k: that of an
adapter's second factor costs little, and is as large as the layer's own."""

ATTENTION = "aten::_scaled_dot_product_"
"""How the names of torch's attention operations begin, of which a device has its own."""


def recompute(model: Any, activations: Activations, *, reentrant: bool = False) -> None:
    """Have a model's layers recompute as `activations` says.

    Args:
        model: of transformers, adapted or not.
        reentrant: by torch's older form, which recomputes all of a layer or nothing.

    Raises:
        UnsupportedError: the model's layers, or the older form, cannot.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not activations.every:
        return
    options: dict[str, Any] = {"use_reentrant": reentrant}
    if activations.selective:
        if reentrant:
            raise UnsupportedError(
                "train.gradient_checkpointing.selective: the installed engine needs torch's "
                "reentrant form, which can only recompute whole layers. Leave it out"
            )
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    base: Any = base_of(model)
    name = type(base).__name__
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"train.gradient_checkpointing: {name} does not support it. Set it to false"
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # the name before transformers 5.23
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if not reentrant and getattr(base, "_require_grads_hooks", None):
        # transformers asks it in any case, which costs the gradient of the first layer's input.
        base.disable_input_require_grads()
    if activations.every == 1:
        return
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    ]
    if not layers:
        raise UnsupportedError(
            f"train.gradient_checkpointing.every: the layers of {name} recompute together or not "
            "at all. Set train.gradient_checkpointing to true or false"
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % activations.every == 0


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    kept = name.startswith(ATTENTION)
    if name in PRODUCTS:
        second = args[PRODUCTS[name] + 1]
        kept = second.shape[-1] <= CHEAP_RATIO * second.shape[-2]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
