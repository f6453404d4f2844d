"""A model that returns its loss when it is given targets: the one place where a loss is made.

Its own forward runs unchanged. Either the loss is made of its logits; or its output layer hands its
input and weight to a kernel, and what it returns in place of logits is empty. What an architecture
does to its logits afterwards must then be done in the kernel: it is found by trying its forward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import FULL, Level, Support

IGNORE = -100
"""The label of a token that does not count."""

_ROWS = "anygauge_loss_rows"

LossKernel = Callable[..., Tensor]
"""``linear_cross_entropy`` of `anygauge.interface.kernels`."""


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """What an architecture does with its output layer's product: cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    softcap: float | None = None

    def bound(self, kernel: LossKernel) -> LossKernel:
        """A kernel that does the same."""
        return functools.partial(kernel, scale=self.scale, softcap=self.softcap)

    def __call__(self, x: Tensor) -> Tensor:
        """The logits, of the product."""
        x = x * self.scale
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap


class _NotServed(Exception):
    """Why an architecture's loss cannot be made by its output layer."""


def logits_rule(model: Any) -> tuple[LogitsRule, Support]:
    """What the model's forward does between its decoder and its logits, seen by running it.

    The decoder and the output layer are stood in for while it runs: parameters may be on the meta
    device. Only what is found to be one of the known rules is served.

    Args:
        model: with its adapter, before anything is put into it.

    Returns:
        The rule, and whether `return_loss` can make the loss in the output layer; the reason if
        not.
    """
    try:
        return _tried(base_of(model)), FULL
    except _NotServed as error:
        return LogitsRule(), Support(Level.NOT_WRITTEN_YET, str(error))


def _tried(model: Any) -> LogitsRule:
    name = type(model).__name__
    head: Any = model.get_output_embeddings()
    _check_head(head, name)
    if "forward" in vars(model) or "forward" in vars(head):
        raise _NotServed(f"the forward of this {name} was replaced by something else")
    decoder = _decoder(model, head, name)
    hidden = torch.linspace(-1.0, 1.0, 2 * 8).reshape(1, 2, 8)
    product = torch.linspace(-90.0, 90.0, 2 * 32).reshape(1, 2, 32)
    given: list[Tensor] = []

    def head_forward(_: Any, x: Tensor) -> Tensor:
        given.append(x)
        return product.clone()

    replace_forward(head, head_forward)
    replace_forward(decoder, lambda *_, **__: _decoded(hidden))
    try:
        ids = torch.zeros(1, 2, dtype=torch.long)
        with torch.no_grad():
            logits = model.forward(input_ids=ids, use_cache=False).logits
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _NotServed(f"the forward of {name} could not be followed: {reason}") from error
    finally:
        del head.forward, decoder.forward
    if len(given) != 1 or given[0].shape != hidden.shape:
        raise _NotServed(f"{name} does not give its last hidden state to its output layer once")
    if logits.shape != product.shape:
        raise _NotServed(f"{name} returns logits of another shape than its output layer's")
    for rule in _candidates(model.config):
        if torch.allclose(logits.float(), rule(product), rtol=1e-5, atol=1e-6):
            return rule
    raise _NotServed(f"{name} changes its logits in a way that is not known here")


def _check_head(head: Any, name: str) -> None:
    if type(head) is nn.Linear:
        return
    from peft.tuners.lora import Linear

    if not isinstance(head, Linear) or type(head.base_layer) is not nn.Linear:
        kind = "none" if head is None else f"a {type(head).__name__}"
        raise _NotServed(f"the output layer of {name} is {kind}, not a torch.nn.Linear")
    if head.use_dora[head.active_adapters[0]]:
        raise _NotServed("DoRA on the output layer normalises its whole weight")


def _decoder(model: Any, head: Any, name: str) -> Any:
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    if found is model or found is head or found is None:  # some call their output layer decoder
        names = (model.base_model_prefix, "model")
        found = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if not isinstance(found, nn.Module) or "forward" in vars(found):
        raise _NotServed(f"the decoder of {name} was not found")
    return found


def _decoded(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Decoded(BaseModelOutputWithPast):
        """A decoder's output; fields that only some kinds of it have are None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Decoded(last_hidden_state=hidden)


def _candidates(config: Any) -> list[LogitsRule]:
    """Rules by what configurations call their numbers; each is tried, none is believed."""
    text = config.get_text_config()

    def number(name: str) -> float | None:
        value = getattr(text, name, None)
        return float(value) if isinstance(value, int | float) and value else None

    factor, divisor = number("logit_scale"), number("logits_scaling")
    scales = [1.0]
    scales += [] if factor is None else [factor]
    scales += [] if divisor is None else [1.0 / divisor, divisor]
    caps = [None, number("final_logit_softcapping")]
    return [LogitsRule(scale, cap) for cap in dict.fromkeys(caps) for scale in scales]


def state_loss_rows(labels: Tensor, rows: Tensor) -> None:
    """Note on (B, T) labels which of their B * T rows have a loss, as the host knows it.

    A kernel that skips the others would ask the device, and wait for its answer.

    Args:
        rows: (n,) int64 on the device, rising.
    """
    setattr(labels, _ROWS, rows)


class _Pending:
    """What one forward is asked for, and its answer.

    Attributes:
        targets: (B * T,); None: logits are wanted.
        rows: what `state_loss_rows` noted; None: nobody did.
        low_rank: of an adapter of the output layer, on the way to it.
    """

    def __init__(self, kernel: LossKernel) -> None:
        self.kernel = kernel
        self.targets: Tensor | None = None
        self.rows: Tensor | None = None
        self.low_rank: tuple[Tensor, Tensor] | None = None
        self.loss: Tensor | None = None

    def compute(self, hidden: Tensor, layer: Any) -> Tensor:
        """Make the loss; returns what takes the place of the logits: (1, 1, 1), zero."""
        assert self.targets is not None
        rows = self.rows

        def kept(each: Tensor) -> Tensor:
            return each if rows is None else each.index_select(0, rows)

        self.loss = self.kernel(
            kept(hidden.reshape(-1, hidden.shape[-1])),
            layer.weight,
            kept(self.targets),
            bias=layer.bias,
            low_rank=self.low_rank and (kept(self.low_rank[0]), self.low_rank[1]),
            ignore_index=IGNORE,
            **({} if rows is None else {"skip_ignored": False}),
        )
        if not layer.weight.requires_grad and (
            self.low_rank is None or not self.low_rank[1].requires_grad
        ):
            # Backward reads no weight: a strategy that shards it need not bring it back.
            return self.loss.new_zeros(1, 1, 1)
        return (self.loss * 0).reshape(1, 1, 1)


def return_loss(model: Any, kernel: LossKernel | None = None) -> None:
    """Let `model` return its loss, and no logits, whenever it is called with ``shift_labels``.

    Call it once adapters are in place. With shift_labels (B, T) int64, the token that each position
    is to predict and -100 where there is no loss, the model's output has ``loss``, the sum of token
    losses in nats, () float32, and its logits are None; without them it is what it was.

    Args:
        kernel: makes the loss in the output layer, with the model's `LogitsRule` bound to it. None:
            of the logits.
    """
    causal = base_of(model)
    if kernel is None:
        replace_forward(causal, _forward_with_logits(vars(causal).get("forward")))
        return
    head: Any = causal.get_output_embeddings()
    pending = _Pending(kernel)
    if type(head) is nn.Linear:
        replace_forward(head, _layer_forward(pending))
    else:
        _fuse_adapted_head(head, pending)
    replace_forward(causal, _model_forward(pending))


def model_loss(outputs: Any) -> Tensor:
    """The loss that a model returned: the sum of token losses in nats, () float32."""
    loss: Tensor = outputs.loss
    return loss


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of token losses in nats.

    Args:
        logits: (B, T, V), any floating type.
        targets: (B, T) int64, the token that each position predicts; -100 where there is no loss.

    Returns:
        () float32. Zero, with a gradient path, where nothing has a loss.
    """
    vocabulary = logits.shape[-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, vocabulary).float(),
        targets.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
    )


def base_of(model: Any) -> Any:
    """The model that an adapter is around, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Let a module compute with a function that takes the module first."""
    # Bound, so that a copy of the module computes with the copy's weights.
    module.forward = types.MethodType(forward, module)


def _forward_with_logits(replaced: Callable[..., Any] | None) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if replaced is None:
            outputs = type(self).forward(self, *args, **kwargs)
        else:
            outputs = replaced(*args, **kwargs)
        if shift_labels is not None:
            outputs.loss = summed_cross_entropy(outputs.logits, shift_labels)
            outputs.logits = None
        return outputs

    return forward


def _model_forward(pending: _Pending) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if shift_labels is None:
            return type(self).forward(self, *args, **kwargs)
        pending.targets = shift_labels.reshape(-1)
        pending.rows = getattr(shift_labels, _ROWS, None)
        try:
            outputs = type(self).forward(self, *args, **kwargs)
            loss = pending.loss
        finally:
            pending.targets = pending.rows = pending.low_rank = pending.loss = None
        if loss is None:
            raise RuntimeError(f"{type(self).__name__} did not call its output layer")
        if outputs.logits.requires_grad:
            # Zero: it carries the gradient through the layer's hooks, which bring weights back.
            loss = loss + outputs.logits.sum()
        outputs.logits, outputs.loss = None, loss
        return outputs

    return forward


def _layer_forward(pending: _Pending) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        if pending.targets is None:
            plain: Tensor = type(self).forward(self, input)
            return plain
        return pending.compute(input, self)

    return forward


def _fuse_adapted_head(head: Any, pending: _Pending) -> None:
    """Let an output layer with LoRA make the loss.

    The two matrices are in modules of their own, each of which may have to be called for its weight
    to be there: one is called within the other.
    """
    (name,) = head.active_adapters
    second: Any = head.lora_B[name]
    scaling = head.scaling[name]

    def head_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if pending.targets is None or self.disable_adapters or self.merged:
            # With targets, the base's layer makes the loss by itself.
            plain: Tensor = type(self).forward(self, x, *args, **kwargs)
            return plain
        low = self.lora_A[name](self.lora_dropout[name](x.to(self.lora_A[name].weight.dtype)))
        result: Tensor = self.lora_B[name](low * scaling, hidden=x, layer=self.base_layer)
        return result

    def second_forward(
        self: Any, input: Tensor, hidden: Tensor | None = None, layer: Any = None
    ) -> Tensor:
        if hidden is None:
            plain: Tensor = type(self).forward(self, input)
            return plain
        pending.low_rank = (input.reshape(-1, input.shape[-1]).to(hidden.dtype), self.weight)
        result: Tensor = layer(hidden)
        return result

    replace_forward(head, head_forward)
    replace_forward(second, second_forward)
    replace_forward(head.base_layer, _layer_forward(pending))
