"""Operations that take memory for themselves, made of the operations that torch's kernels call.

Without values an operation is one step from its arguments to its result, and what it needs
meanwhile is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.models.quantised import NESTED_BLOCK


class OpenedUp(TorchDispatchMode):
    """Within it, such operations show what they take."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or its parts."""
        opened = opened_up(func)
        return (func if opened is None else opened)(*args, **(kwargs or {}))


@functools.cache
def opened_up(func: Any) -> Callable[..., Any] | None:
    """What shows what an operation takes, in its place; None: nothing needs to."""
    return _OPENED.get(str(func))


def _logsumexp(tensor: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    """As `logsumexp_out_impl` in torch's ReduceOps.cpp, of finite numbers."""
    largest = tensor.amax(dims, keepdim=True)
    result = (tensor - largest).exp_().sum(dims, keepdim=keepdim)
    return result.log_().add_(largest if keepdim else largest.squeeze(dims))


def _gemm_4bit(
    tensor: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    scales: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Any = None,
) -> Tensor:
    """As `_gemm_4bit_default_impl` in bitsandbytes, and its kernels of more than a few rows."""
    few_bits = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = few_bits.dequantize_blockwise.default(
            absmax_8bit, scales, absmax_code, NESTED_BLOCK, torch.float32
        )
        scales = scales + absmax_offset
    weight = few_bits.dequantize_4bit.default(codes, scales, block, kind, shape, tensor.dtype)
    return torch.nn.functional.linear(tensor, weight, bias)


def _quantised_rows(tensor: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Any]:
    """Of inputs of which none is above the threshold."""
    outliers = None
    if threshold > 0.0:
        tensor.abs().ge(threshold)
        outliers = tensor.new_empty(0, dtype=torch.long)
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(tensor, 0.0)
    return codes, scales, outliers


def _int8_product(
    tensor: Tensor,
    inputs: Tensor,
    codes: Tensor,
    row_scales: Tensor,
    scales: Tensor,
    outliers: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``int8_mixed_scaled_mm`` of bitsandbytes, of such inputs."""
    few_bits = torch.ops.bitsandbytes
    product = few_bits.int8_linear_matmul.default(inputs, codes)
    result = few_bits.int8_mm_dequant.default(product, row_scales, scales, tensor.dtype, bias)
    return result, tensor.new_empty(0)


_OPENED: Mapping[str, Callable[..., Any]] = {
    "aten.logsumexp.default": _logsumexp,
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
    "bitsandbytes.int8_vectorwise_quant.default": _quantised_rows,
    "bitsandbytes.int8_mixed_scaled_mm.default": _int8_product,
}
"""By name: bitsandbytes may not be there."""
