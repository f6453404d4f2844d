"""Kernels of Gaudi's library, in the form that anygauge's models take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anygauge.interface import AttentionKernel, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def fused_attention(*, fast: bool = False, recompute: bool = False) -> AttentionKernel:
    """Attention in one kernel. Its softmax is its own: no softmax setting reaches it.

    Args:
        fast: with the library's fast softmax.
        recompute: the kernel keeps no scores for backward and computes them again there.
    """
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
        if fast and recompute and attention_mask is not None and query.requires_grad:
            # The library asserts it (FusedSDPA.py, sdpa_fwd_wrapper).
            raise UnsupportedError(
                f"{type(module).__name__} needs a mask of its own, and Gaudi's fused attention "
                "trains with a fast softmax and recomputation only where each token sees all "
                "before it: remove backend_options.fast_softmax or "
                "backend_options.attention_recompute"
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
            "fast" if fast else "None",
            # Named: None would ask a switch of the library's, which anything may have set.
            recompute,
        )
        return output.transpose(1, 2).contiguous(), None

    parts = ["fused", *["fast softmax"] * fast, *["scores recomputed in backward"] * recompute]
    return AttentionKernel(
        name=fused_name(fast=fast, recompute=recompute),
        forward=forward,
        describe=f"{', '.join(parts)}; its softmax is the kernel's own",
        causal=True,
        trains_with_mask=not (fast and recompute),
    )


def fused_name(*, fast: bool, recompute: bool) -> str:
    """Under which a form of fused attention is registered."""
    return "gaudi_fused" + "_fast" * fast + "_recompute" * recompute


fused_attention_fast = functools.partial(fused_attention, fast=True)
fused_attention_recompute = functools.partial(fused_attention, recompute=True)
fused_attention_fast_recompute = functools.partial(fused_attention, fast=True, recompute=True)


def attention_with_softmax(*, in_float32: bool) -> AttentionKernel:
    """Products and a softmax.

    Args:
        in_float32: the softmax is in float32, as the model library has it on other devices; else in
            the type of the scores, which takes half the memory.
    """
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
        softmax_dtype = torch.float32 if in_float32 else scores.dtype
        weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(query.dtype)
        weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    return AttentionKernel(
        name=f"gaudi_softmax_{'fp32' if in_float32 else 'bf16'}",
        forward=forward,
        describe=f"products and a softmax in {'float32' if in_float32 else 'the compute type'}",
    )


attention_with_softmax_in_bfloat16 = functools.partial(attention_with_softmax, in_float32=False)
attention_with_softmax_in_float32 = functools.partial(attention_with_softmax, in_float32=True)


def softmax(*, in_float32: bool) -> Callable[..., Tensor]:
    """The softmax operation.

    Args:
        in_float32: it is rounded at the end; else scale, mask and all are in the type of the input:
            an exception from the operation's rule, to be asked for, as what the library accumulates
            in is not known.
    """
    import torch

    def forward(
        x: Tensor,
        dim: int = -1,
        mask: Tensor | None = None,
        scale: float = 1.0,
        *,
        causal_offset: int | None = None,
    ) -> Tensor:
        """See `anygauge.interface.kernels`."""
        scores = x.float() if in_float32 else x
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

    return forward


softmax_in_bfloat16 = functools.partial(softmax, in_float32=False)
softmax_in_float32 = functools.partial(softmax, in_float32=True)


def fused_rope() -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(query (B, H, T, D), key (B, G, T, D), cos, sin (B or 1, T, D)) -> both, rotated by halves.

    As optimum-habana's models call it in training (modeling_all_models.py,
    apply_customized_rope_module): the kernel reads rows of a table (1, 1, S, D) by their numbers
    (B, T). Rows that each position has of its own are such a table, one after another.
    """
    import torch
    from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingHelperV2

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = query.shape[0], query.shape[2]
        tables = [turn.reshape(1, 1, -1, turn.shape[-1]) for turn in (cos, sin)]
        numbers = torch.arange(tables[0].shape[2], device=query.device).reshape(cos.shape[:2])
        numbers = numbers.expand(rows, length).contiguous()
        rotated = [RotaryPosEmbeddingHelperV2.apply(x, *tables, numbers) for x in (query, key)]
        return rotated[0], rotated[1]

    return rotate


def fused_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    """(x (..., D), weight (D,), epsilon) -> weight * x / rms(x), in one kernel, as x.

    The kernel gets both in one type: optimum-habana's models (modeling_llama.py,
    gaudi_llama_rmsnorm_forward) say that mixed types are not good for it. That type is the wider of
    the two; theirs is the weight's.
    """
    import torch
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    def apply(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if x.dtype == weight.dtype:
            return FusedRMSNorm.apply(x, weight, epsilon)
        both = torch.promote_types(x.dtype, weight.dtype)
        return FusedRMSNorm.apply(x.to(both), weight.to(both), epsilon).to(x.dtype)

    return apply


def fused_adamw() -> Callable[..., Optimizer]:
    """(groups, lr, betas, eps) -> AdamW in one kernel per group.

    Its epsilon is added before the second moment's bias is corrected, torch's after. In lazy mode
    it marks a step before each group and at the end.
    """
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    class CountedAdamW(FusedAdamW):
        """The library counts the steps of a group; here each parameter has the count, too, as
        torch's optimizers have it: a run resumes from there, on this device or another."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            for group in self.param_groups:
                # Each has made the same number of steps, but for those without a state.
                made = {int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)}
                group["step"] = max(made, default=0)
            result = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter]["step"] = group["step"]
            return result

    return CountedAdamW


def fused_clip_grad_norm() -> Callable[[Sequence[nn.Parameter], float], Tensor]:
    """(parameters, max_norm) -> norm of all gradients, which are scaled in place, in one kernel."""
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm

    clippers: dict[float, Any] = {}

    def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        # Each copies its limit to the card once.
        if max_norm not in clippers:
            clippers[max_norm] = FusedClipNorm(parameters, max_norm)
        norm: Tensor = clippers[max_norm].clip_norm(parameters)
        return norm

    return clip
