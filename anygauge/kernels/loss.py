"""A model that returns its loss when it is given targets: the one place where a loss is made.

Its own forward runs unchanged. Either the loss is made of its logits; or its output layer hands its
input and weight to a kernel, and what it returns in place of logits is empty. What an architecture
does to its logits afterwards must then be done in the kernel: see `logits_rule`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

IGNORE = -100
"""The label of a token that does not count."""

_ROWS = "anygauge_loss_rows"
_COUNTS = "anygauge_loss_counts"

LossKernel = Callable[..., Tensor]
"""``linear_cross_entropy`` of `anygauge.interface.kernels`."""


def state_loss_rows(labels: Tensor, rows: Tensor, counts: Sequence[int]) -> None:
    """Note on (B, T) labels which of their B * T rows have a loss, as the host knows it.

    A kernel that skips the others would ask the device, and wait for its answer.

    Args:
        rows: (n,) int64 on the device, rising.
        counts: how many of them each of the B sequences has.
    """
    setattr(labels, _ROWS, rows)
    setattr(labels, _COUNTS, counts)


class _PendingLoss:
    """The loss that one forward is to make, and its result.

    Attributes:
        targets: (B * T,); None: logits are wanted.
        rows: what `state_loss_rows` noted; None: nobody did.
        counts: rows of each sequence, whose losses are wanted one by one; None: their sum is.
        low_rank: of an adapter of the output layer, on the way to it.
    """

    def __init__(self, kernel: LossKernel, *, by_sequence: bool = False) -> None:
        self.kernel, self.by_sequence = kernel, by_sequence
        self.targets: Tensor | None = None
        self.rows: Tensor | None = None
        self.counts: Sequence[int] | None = None
        self.low_rank: tuple[Tensor, Tensor] | None = None
        self.loss: Tensor | None = None

    def compute(self, hidden: Tensor, layer: Any) -> Tensor:
        """Make the loss; returns what takes the place of the logits: (1, 1, 1), zero."""
        assert self.targets is not None
        rows = self.rows

        def kept(each: Tensor) -> Sequence[Tensor]:
            each = each if rows is None else each.index_select(0, rows)
            return [each] if self.counts is None else each.split(list(self.counts))

        parts = kept(hidden.reshape(-1, hidden.shape[-1]))
        low = kept(self.low_rank[0]) if self.low_rank else [None] * len(parts)
        losses = [
            self.kernel(
                part,
                layer.weight,
                targets,
                bias=layer.bias,
                low_rank=self.low_rank and (below, self.low_rank[1]),
                ignore_index=IGNORE,
                **({} if rows is None else {"skip_ignored": False}),
            )
            for part, targets, below in zip(parts, kept(self.targets), low, strict=True)
        ]
        self.loss = losses[0] if self.counts is None else torch.stack(losses)
        if not layer.weight.requires_grad and (
            self.low_rank is None or not self.low_rank[1].requires_grad
        ):
            # Backward reads no weight: a strategy that shards it need not bring it back.
            return self.loss.new_zeros(1, 1, 1)
        return (self.loss.sum() * 0).reshape(1, 1, 1)


def return_loss(model: Any, kernel: LossKernel | None = None, *, by_sequence: bool = False) -> None:
    """Let `model` return its loss, and no logits, whenever it is called with ``shift_labels``.

    Call it once adapters are in place. With shift_labels (B, T) int64, the token that each position
    is to predict and -100 where there is no loss, the model's output has ``loss``, the sum of token
    losses in nats, () float32, and its logits are None; without them it is what it was.

    Args:
        kernel: makes the loss in the output layer, with the model's `LogitsRule` bound to it. None:
            of the logits.
        by_sequence: ``loss`` is that of each sequence by itself, (B,) float32.
    """
    causal = base_of(model)
    if kernel is None:
        usual = vars(causal).get("forward")
        replace_forward(causal, _forward_with_logits(usual, by_sequence=by_sequence))
        return
    head: Any = causal.get_output_embeddings()
    pending = _PendingLoss(kernel, by_sequence=by_sequence)
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
        logits: (..., T, V), any floating type.
        targets: (..., T) int64, the token that each position predicts; -100 where there is no loss.

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


def _forward_with_logits(
    replaced: Callable[..., Any] | None, *, by_sequence: bool
) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if replaced is None:
            outputs = type(self).forward(self, *args, **kwargs)
        else:
            outputs = replaced(*args, **kwargs)
        if shift_labels is not None:
            pairs = zip(outputs.logits, shift_labels, strict=True)
            outputs.loss = (
                torch.stack([summed_cross_entropy(*each) for each in pairs])
                if by_sequence
                else summed_cross_entropy(outputs.logits, shift_labels)
            )
            outputs.logits = None
        return outputs

    return forward


def _model_forward(pending: _PendingLoss) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if shift_labels is None:
            return type(self).forward(self, *args, **kwargs)
        pending.targets = shift_labels.reshape(-1)
        pending.rows = getattr(shift_labels, _ROWS, None)
        if pending.by_sequence:
            whole = [shift_labels.shape[1]] * shift_labels.shape[0]
            pending.counts = getattr(shift_labels, _COUNTS, whole)
        try:
            outputs = type(self).forward(self, *args, **kwargs)
            loss = pending.loss
        finally:
            pending.targets = pending.rows = pending.counts = None
            pending.low_rank = pending.loss = None
        if loss is None:
            raise RuntimeError(f"{type(self).__name__} did not call its output layer")
        if outputs.logits.requires_grad:
            # Zero: it carries the gradient through the layer's hooks, which bring weights back.
            loss = loss + outputs.logits.sum()
        outputs.logits, outputs.loss = None, loss
        return outputs

    return forward


def _layer_forward(pending: _PendingLoss) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        if pending.targets is None:
            plain: Tensor = type(self).forward(self, input)
            return plain
        return pending.compute(input, self)

    return forward


def _fuse_adapted_head(head: Any, pending: _PendingLoss) -> None:
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
