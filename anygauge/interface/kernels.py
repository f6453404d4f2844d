"""What the factory of a `KernelSpec` returns, operation by operation.

| operation | what the factory returns |
|---|---|
| ``attention`` | an `AttentionKernel` |
| ``rms_norm`` | (x (..., D), weight (D,), epsilon) -> weight * x / sqrt(mean(x²) + epsilon), as x |
| ``rope`` | (query (B, H, T, D), key (B, G, T, D), cos (B or 1, T, D), sin), see below |
| ``softmax`` | (x, dim=-1, mask=None, scale=1.0, *, causal_offset=None), see below |
| ``lora_linear`` | a `LoraKernel` |
| ``linear_cross_entropy`` | (hidden, weight, targets, *, ...), see below |
| ``adamw`` | (groups, lr, betas, eps) -> a `torch.optim.Optimizer` over float32 parameters |
| ``clip_grad_norm`` | (parameters, max_norm) -> norm of all their gradients, which are scaled |

``softmax``: of scale * x along `dim`, in x's type, accumulated in float32 or better. The mask is
broadcast to x: boolean, True takes part; floating, added after the scale. With a causal offset, row
r of the last two dimensions has columns up to r + offset. A row that the mask or the offset leaves
empty is zero; x itself is finite.

``rope``: returns query and key, each x * cos + rotate_half(x) * sin, as x; rotate_half of (a, b),
the halves along D, is (-b, a).

``linear_cross_entropy``: sum of the cross entropies of hidden (N, D) @ weight.T (V, D) for targets
(N,) int64, () float32, without holding N x V logits. By keyword, all with defaults: bias (V,);
low_rank ((N, R), (V, R)), whose product is added; ignore_index -100;
logits = softcap * tanh(scale * logits / softcap); skip_ignored, that rows which do not count may be
left out where shapes can follow values. A kernel that also takes mark_step is given, on devices
that compile each shape anew, a function without arguments that ends a graph: called between
chunks that are all alike, it lets one graph serve all of them.

``adamw``: groups have ``params``, ``lr`` and ``weight_decay``, which is decoupled; the state of a
parameter is ``exp_avg``, ``exp_avg_sq`` and ``step``, from which a run resumes on any device. eps
is added after the second moment's bias is corrected, as torch does; a kernel that adds it before
says so with `KernelSpec.counterpart`: ``early_epsilon``.
``clip_grad_norm``: in place; the norm is a tensor, of the gradients before; max_norm is above 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionKernel", "LoraKernel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """An attention implementation in the form that the model library calls.

    Attributes:
        name: under which it is registered; without ``sdpa``, ``flash`` or ``flex_attention`` in
            it, because the library looks for these words in names.
        forward: (module, query (B, H, T, D), key (B, G, S, D), value (B, G, S, D), attention_mask
            as those of `mask`, or None, scaling, dropout, and more by keyword) ->
            (output (B, T, H, D), weights or None). G divides H.
        describe: in a few words, for the run's record: what computes the softmax.
        mask: the library's attention whose masks it takes.
        drops: whether it drops attention weights when it is asked to.
        smallest_head: least D that it serves.
        causal: without a mask, and with more than one query, it has each query see the keys up to
            its own position. Then no mask is made where each token sees all before it: padding is
            on the right, so that no token sees any, and what padding computes is not used.
        trains_with_mask: whether it takes a mask where gradients are wanted; one that does not
            raises `UnsupportedError`, and is `causal`.
    """

    name: str
    forward: Callable[..., Any]
    describe: str
    mask: str = "eager"
    drops: bool = True
    smallest_head: int = 1
    causal: bool = False
    trains_with_mask: bool = True

    def __post_init__(self) -> None:
        for word in ("sdpa", "flash", "flex_attention"):
            if word in self.name:
                raise ValueError(
                    f"attention kernel {self.name!r}: the model library takes names with {word!r} "
                    "for its own; choose another"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraKernel:
    """Both products of a LoRA layer. All tensors of a call have one type, and so has its result.

    Attributes:
        down: (x (..., D), weight (R, D), dropout) -> dropout(x) @ weight.T; dropout is the
            probability of a zero, 0 outside training; its draws are those of `torch.nn.Dropout`.
        up: (output (..., V) of the frozen layer, low (..., R), weight (V, R), scale) ->
            output + scale * low @ weight.T, a new tensor.
    """

    down: Callable[[Tensor, Tensor, float], Tensor]
    up: Callable[[Tensor, Tensor, Tensor, float], Tensor]
