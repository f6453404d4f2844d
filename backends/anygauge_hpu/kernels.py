"""Kernels of Gaudi's library, in the form that anygauge's models take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anygauge.interface import AttentionKernel, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def fused_attention() -> AttentionKernel:
    """Attention in one kernel. Its softmax is its own: no softmax setting reaches it."""
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Query (B, H, T, D), key and value (B, G, S, D) with G dividing H -> (B, T, H, D)."""
        if softcap is not None:
            raise UnsupportedError(
                f"{type(module).__name__} caps its attention scores, which Gaudi's fused attention "
                "does not: set backend_options.attention: softmax"
            )
        # By position: autograd functions take no keywords.
        output = FusedSDPA.apply(
            query,
            key,
            value,
            attention_mask,
            dropout if module.training else 0.0,
            attention_mask is None and query.shape[2] > 1,
            scaling,
            "None",
            # Not recomputed inside: gradient checkpointing recomputes the whole layer.
            False,
        )
        return output.transpose(1, 2).contiguous(), None

    return AttentionKernel(
        name="gaudi_fused", forward=forward, describe="fused; its softmax is the kernel's own"
    )


def attention_with_softmax_in_bfloat16() -> AttentionKernel:
    """Products and a softmax in the type of the scores: half the memory of float32's."""
    return AttentionKernel(
        name="gaudi_softmax_bf16",
        forward=_with_softmax(lambda scores: scores.dtype),
        describe="products and a softmax in the compute type",
    )


def attention_with_softmax_in_float32() -> AttentionKernel:
    """Products and a softmax in float32, as the model library has it on other devices."""

    def float32(scores: Tensor) -> torch.dtype:
        import torch

        return torch.float32

    return AttentionKernel(
        name="gaudi_softmax_fp32",
        forward=_with_softmax(float32),
        describe="products and a softmax in float32",
    )


def _with_softmax(softmax_dtype: Callable[[Tensor], torch.dtype]) -> Callable[..., Any]:
    import torch

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Query (B, H, T, D), key and value (B, G, S, D) with G dividing H -> (B, T, H, D)."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        scores = torch.matmul(query, key.transpose(2, 3)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask[..., : key.shape[-2]]
        # The type is named: autocast on this device would choose bfloat16 by itself.
        weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype(scores)).to(query.dtype)
        weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    return forward


def softmax_in_bfloat16() -> Callable[..., Tensor]:
    """The softmax operation in the type of its input, scale and mask as well.

    An exception from the operation's rule, to be asked for: what the library accumulates in is not
    known.
    """
    return _softmax(lambda x: x.dtype)


def softmax_in_float32() -> Callable[..., Tensor]:
    """The softmax operation in float32, rounded at the end."""

    def float32(x: Tensor) -> torch.dtype:
        import torch

        return torch.float32

    return _softmax(float32)


def _softmax(inner: Callable[[Tensor], torch.dtype]) -> Callable[..., Tensor]:
    import torch

    def softmax(
        x: Tensor,
        dim: int = -1,
        mask: Tensor | None = None,
        scale: float = 1.0,
        *,
        causal_offset: int | None = None,
    ) -> Tensor:
        """See `anygauge.interface.kernels`."""
        scores = x.to(inner(x))
        if scale != 1.0:
            scores = scores * scale
        if mask is not None and mask.dtype is torch.bool:
            scores = torch.where(mask, scores, -torch.inf)
        elif mask is not None:
            scores = scores + mask.to(scores.dtype)
        if causal_offset is not None:
            rows, columns = (torch.arange(n, device=x.device) for n in scores.shape[-2:])
            scores = torch.where(columns <= rows[:, None] + causal_offset, scores, -torch.inf)
        # The type is named: autocast on this device would choose bfloat16 by itself.
        if mask is None and causal_offset is None:
            return torch.softmax(scores, dim=dim, dtype=scores.dtype).to(x.dtype)
        empty = scores.amax(dim, keepdim=True) == -torch.inf
        weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=dim, dtype=scores.dtype)
        return weights.masked_fill(empty, 0.0).to(x.dtype)

    return softmax


def fused_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    """(x (..., D), weight (D,), epsilon) -> weight * x / rms(x), in one kernel."""
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    def apply(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return FusedRMSNorm.apply(x, weight, epsilon)

    return apply
