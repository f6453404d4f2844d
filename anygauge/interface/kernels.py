"""What the factory of a `KernelSpec` returns, operation by operation.

| operation | what the factory returns |
|---|---|
| ``attention`` | an `AttentionKernel` |
| ``rms_norm`` | (x (..., D), weight (D,), epsilon) -> weight * x / sqrt(mean(x²) + epsilon), as x |
| ``softmax`` | (x, dim) -> softmax of x along dim, in x's type |
| ``adamw`` | (groups, lr, betas, eps) -> a `torch.optim.Optimizer` over float32 parameters |
| ``clip_grad_norm`` | (parameters, max_norm) -> norm of all their gradients, which are scaled |

``adamw``: groups have ``params``, ``lr`` and ``weight_decay``, which is decoupled; the state of a
parameter is ``exp_avg``, ``exp_avg_sq`` and ``step``, from which a run goes on elsewhere.
``clip_grad_norm``: in place; the norm is a tensor, of the gradients before; max_norm is above 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """An attention implementation in the form that the model library calls.

    Attributes:
        name: under which it is registered; without ``sdpa``, ``flash`` or ``flex_attention`` in
            it, because the library looks for these words in names.
        forward: (module, query (B, H, T, D), key (B, G, S, D), value (B, G, S, D), attention_mask
            (B, 1, T, S) additive or None, scaling, dropout, and more by keyword) ->
            (output (B, T, H, D), weights or None). G divides H.
        describe: in a few words, for the run's record: what computes the softmax.
        mask: the library's attention whose masks it takes.
    """

    name: str
    forward: Callable[..., Any]
    describe: str
    mask: str = "eager"

    def __post_init__(self) -> None:
        for word in ("sdpa", "flash", "flex_attention"):
            if word in self.name:
                raise ValueError(
                    f"attention kernel {self.name!r}: the model library takes names with {word!r} "
                    "for its own; choose another"
                )
