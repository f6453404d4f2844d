"""Kernels in Triton, in its interpreter where there is no GPU, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.test_linear_cross_entropy import CLASSES, gradients, held, inputs
from tests.kernels.test_softmax import MASKED, agrees, masked

pytest.importorskip("triton")

from anygauge_kernels import triton_loss, triton_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def softmax_agrees(x: Tensor, mask: Tensor | None, *how: Any) -> None:
    agrees(triton_softmax.softmax, x, mask, *how, device=DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "scale", "offset"), MASKED)
def test_masks_scales_and_offsets(kind: str, scale: float, offset: int | None, dtype: str) -> None:
    softmax_agrees(*masked(kind, dtype), scale, offset)


@pytest.mark.parametrize(
    "columns",
    [
        *(1, 2, 1000, 4096, 5000, 32768, 32769),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (70001, 262144)),
    ],
)
def test_rows_of_any_length(columns: int) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)) * 4
    x[0, columns // 2] = 30.0
    x[1] = -1e30
    softmax_agrees(x, None, 1.0)
    seen = torch.arange(columns) % 3 == 0
    softmax_agrees(x.bfloat16(), seen, 0.5)
    softmax_agrees(x, seen, 0.5, columns // 2)


@pytest.mark.parametrize("programs", [1, 7, 512])
@pytest.mark.parametrize("columns", [32769, 70001])
def test_long_rows_of_one_program_and_of_several(
    columns: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_softmax, "PROGRAMS", programs)
    launched = []
    launch = triton_softmax._launch_long_rows

    def counted(kernel: Any, *arguments: Any) -> None:
        class Watched:
            def __getitem__(self, grid: tuple[int, int]) -> Any:
                launched.append(grid)
                return kernel[grid]

        launch(Watched(), *arguments)

    monkeypatch.setattr(triton_softmax, "_launch_long_rows", counted)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)) * 4
    x[2, : columns // 2] = -1e30
    mask = torch.ones(3, columns).bool()
    mask[1] = False  # of which nothing is left
    mask[0, 8192:] = False  # parts of which nothing is left
    softmax_agrees(x, mask, 0.5)
    parts = {1: 1, 7: 3, 512: -(-columns // 8192)}[programs]
    assert launched == [(3, parts)] * (2 if parts == 1 else 4)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_other_dimensions_and_strides(dim: int) -> None:
    x = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(1))
    softmax_agrees(x[:, ::2].transpose(0, 2), None, 0.7, None, dim)


def test_what_it_does_not_do_goes_through_torch() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=DEVICE)
    assert torch.equal(triton_softmax.softmax(x), torch.softmax(x, -1))
    mask = torch.zeros(4, device=DEVICE, requires_grad=True)
    triton_softmax.softmax(x.float(), mask=mask).square().sum().backward()
    assert mask.grad is not None and float(mask.grad.abs().sum()) > 0
    assert triton_softmax.softmax(torch.empty(0, 4, device=DEVICE)).shape == (0, 4)
    with pytest.raises(ValueError, match="last dimension, not of 0"):
        triton_softmax.softmax(x.float(), 0, causal_offset=0)


def moved(given: dict[str, Any], to: Any = lambda value: value.to(DEVICE)) -> dict[str, Any]:
    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(there, value))
        if not isinstance(value, Tensor):
            return value
        return to(value.detach()).requires_grad_(value.requires_grad)

    return {name: there(value) for name, value in given.items()}


@pytest.mark.parametrize(
    ("softcap", "scale", "bias", "low_rank"),
    list(itertools.product((None, 5.0), (1.0, 0.25), *[(False, True)] * 2)),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_is_torchs(
    softcap: float | None, scale: float, bias: bool, low_rank: bool, dtype: str
) -> None:
    given = inputs(getattr(torch, dtype), bias=bias, low_rank=low_rank)
    there = moved(given)
    for skip in (False, True):
        loss = triton_loss.kernel()(
            **there, softcap=softcap, scale=scale, skip_ignored=skip, chunk_bytes=10 * CLASSES * 4
        )
        true = moved(given, lambda value: value.double() if value.is_floating_point() else value)
        wanted = held(true, softcap=softcap, scale=scale)
        near = 1e-5 if dtype == "float32" else 2e-2
        assert loss.item() == pytest.approx(wanted.item(), rel=near)
        pairs = zip(gradients(loss, there), gradients(wanted, true), strict=True)
        for found, one in pairs:
            error = float((found.cpu().double() - one).abs().max() / one.abs().max())
            assert error <= near


@pytest.mark.parametrize("classes", [1, 4096, 4097, 9000])
def test_any_number_of_classes(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    hidden = torch.randn(5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(classes, 8, generator=generator)
    targets = torch.tensor([0, classes - 1, -100, classes // 2, 0])
    there = hidden.detach().to(DEVICE).requires_grad_()
    loss = triton_loss.kernel()(there, weight.to(DEVICE), targets.to(DEVICE))
    wanted = nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    (found,), (true,) = torch.autograd.grad(loss, there), torch.autograd.grad(wanted, hidden)
    torch.testing.assert_close(loss.cpu(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.cpu(), true, rtol=1e-4, atol=1e-5)


def test_float64_goes_through_torch() -> None:
    given = moved(inputs())
    loss = triton_loss.kernel()(**given)
    assert loss.dtype is torch.float64
    assert torch.equal(loss, linear_cross_entropy(**given))
