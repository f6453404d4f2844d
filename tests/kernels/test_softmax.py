"""Softmax with masks and a scale, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge_kernels.softmax import softmax
from anygauge_kernels.softmax_attention import _with_sinks
from tests.helpers.dispatched_operations import TRIANGLES, Operations

EPSILON = {"float64": 1e-14, "float32": 3e-7, "bfloat16": 8e-3, "float16": 1e-3}
"""Half a unit in the last place of the largest output, with room for the sum's order."""


def exact(x: Tensor, mask: Tensor | None, scale: float, causal_offset: int | None) -> Tensor:
    """By the definition, in float64, along the last dimension."""
    scores = x.double() * scale
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf)
            if mask.dtype is torch.bool
            else scores + mask.double()
        )
    if causal_offset is not None:
        rows, columns = torch.meshgrid(*map(torch.arange, x.shape[-2:]), indexing="ij")
        scores = scores.masked_fill(columns > rows + causal_offset, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e300))
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True))


def masks(shape: tuple[int, ...]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    some = torch.rand(shape, generator=generator) < 0.6
    some[0, 0, 1] = False  # a row of which nothing is left
    bias = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return {
        "none": None,
        "boolean": some,
        "boolean, broadcast": some[:, :1],
        "additive": torch.where(some, 0.0, -torch.inf),
        "additive, broadcast": bias,
    }


def agrees(
    kernel: Any,
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    causal_offset: int | None = None,
    dim: int = -1,
    device: str = "cpu",
) -> None:
    """Weights and the gradient of a kernel on a device are those of float64."""
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(x.dtype)
    there = x.to(device).requires_grad_()
    moved = None if mask is None else mask.to(device)
    found = kernel(there, dim, moved, scale, causal_offset=causal_offset)
    assert found.dtype is x.dtype and found.shape == x.shape
    epsilon = EPSILON[str(x.dtype).removeprefix("torch.")]
    wanted = exact(x.detach().movedim(dim, -1), mask, scale, causal_offset).movedim(-1, dim)
    assert float((found.detach().cpu().double() - wanted).abs().max()) <= epsilon
    (gradient,) = torch.autograd.grad(found, there, upstream.to(device))
    # Of float64's own output: a row without a value has a slope of nothing, not of nan.
    slope = wanted * upstream.double()
    true = scale * (slope - wanted * slope.sum(dim, keepdim=True))
    assert float((gradient.cpu().double() - true).abs().max()) <= 8 * epsilon


MASKED = list(itertools.product(masks((2, 3, 5, 7)), (1.0, 0.3), (None, 0, 2, -2)))
"""Kinds of masks, scales, and offsets of a causal mask."""


def masked(kind: str, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Scores, and a mask of a kind."""
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(3)) * 4
    mask = masks((2, 3, 5, 7))[kind]
    if mask is not None and mask.dtype is not torch.bool and dtype != "float64":
        mask = mask.float()
    return x.to(getattr(torch, dtype)), mask


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize(("kind", "scale", "causal_offset"), MASKED)
def test_forward_and_backward(
    kind: str, scale: float, causal_offset: int | None, dtype: str
) -> None:
    agrees(softmax, *masked(kind, dtype), scale, causal_offset)


def test_a_row_without_anything_is_zero() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False, False, False]])
    found = softmax(x, mask=mask)
    assert found[1].tolist() == [0.0] * 4 and found[2].tolist() == [1.0, 0.0, 0.0, 0.0]
    found.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert x.grad[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("columns", [1, 65_536, 65_537, 200_003])
def test_long_rows(columns: int) -> None:
    """Peers fail beyond 65,536 columns."""
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    found = softmax(x, scale=0.5)
    wanted = exact(x, None, 0.5, None)
    assert float((found.double() - wanted).abs().max() / wanted.max()) <= 4e-3
    assert float(found.double().sum(-1).sub(1).abs().max()) <= 2e-3


@pytest.mark.parametrize("dim", [0, 1, -2, 2])
def test_any_dimension_and_any_strides(dim: int) -> None:
    x = torch.randn(4, 6, 5).permute(2, 0, 1)[:, ::2].requires_grad_()
    found = softmax(x, dim, scale=2.0)
    torch.testing.assert_close(found, torch.softmax(x * 2.0, dim))
    given = torch.randn_like(found)
    (mine,) = torch.autograd.grad(found, x, given)
    (its,) = torch.autograd.grad(torch.softmax(x * 2.0, dim), x, given)
    torch.testing.assert_close(mine, its)


def test_a_trained_mask_gets_its_gradient() -> None:
    x, bias = torch.randn(2, 3, 4, 5), torch.randn(3, 1, 5, requires_grad=True)
    given = torch.randn(2, 3, 4, 5)
    (mine,) = torch.autograd.grad(softmax(x, mask=bias, scale=0.5), bias, given)
    (its,) = torch.autograd.grad(torch.softmax(x * 0.5 + bias, -1), bias, given)
    torch.testing.assert_close(mine, its)


def test_large_scores_do_not_overflow() -> None:
    x = torch.tensor([[3.0e38, 3.0e38, -3.0e38]])
    assert softmax(x, mask=torch.tensor([True, True, True])).tolist() == [[0.5, 0.5, 0.0]]


def test_the_causal_offset_is_of_the_last_dimension() -> None:
    with pytest.raises(ValueError, match="causal_offset needs"):
        softmax(torch.zeros(2, 2, 2), 0, causal_offset=0)


def test_input_is_left_as_it_was() -> None:
    x: Any = torch.randn(4, 5)
    before = x.clone()
    softmax(x, scale=0.5, mask=torch.ones(4, 5, dtype=torch.bool))
    assert torch.equal(x, before)


def test_causal_masks_are_made_by_comparing_positions() -> None:
    """Not every device has a kernel for a triangle of truths."""
    from anygauge_hpu.gaudi_kernels import softmax_in_float32

    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    reaching = torch.ones(3, 5, dtype=torch.bool).tril(1)
    wanted = torch.softmax(x.masked_fill(~reaching, -torch.inf), -1)
    for kernel in (softmax, softmax_in_float32()):
        with Operations() as seen:
            found = kernel(x, causal_offset=1)
        torch.testing.assert_close(found, wanted)
        assert not seen.names() & TRIANGLES


def test_sinks_are_beside_scores_that_positions_hide() -> None:
    scores = torch.zeros(1, 2, 2, 3)
    sinks = torch.tensor([1.0, 2.0])
    with Operations() as seen:
        found = _with_sinks(scores, None, sinks, causal_offset=1)
    assert not seen.names() & TRIANGLES
    hidden = -torch.inf
    assert found[0, :, 0].tolist() == [[0, 0, hidden, 1], [0, 0, hidden, 2]]
    assert found[0, :, 1].tolist() == [[0, 0, 0, 1], [0, 0, 0, 2]]
