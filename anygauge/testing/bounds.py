"""Values, how they stand in memory, and how far a result may be from float64.

Bounds follow from the type's roundoff and the number of terms. They hold for every order in which a
sound device may add, and for one that rounds to either neighbour; what rounds always to the same
side shows in the mean (`check_unbiased`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import HOST_DEVICE
from anygauge.testing.check import TOLERANCE, Device

Bound = Callable[[Tensor, torch.dtype], Tensor]
"""From the wanted float64 values and the type: the largest error of each."""

View = Callable[[Tensor], Tensor]
Arrange = Callable[[Tensor], tuple[Tensor, View]]
"""From values: a tensor that holds them, and how to see them in it."""
GUARD_VALUE = 77
"""What stands in memory around a view: it must be neither read nor written."""
MAX_BIAS = 0.25
"""Largest mean error in roundoffs: rounding to nearest gives 0, truncation about 0.7."""
MIN_ELEMENTS = 2**12
"""Elements from which the mean error says something."""


def dtypes(on: Any) -> list[torch.dtype]:
    """Types that the ``backend`` of what is tried declares to compute in."""
    lower = [name for name in TOLERANCE if name != "float32" and on.backend.support(name)]
    return [torch.float32, *(getattr(torch, name) for name in lower)]


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding a number to the type."""
    return float(torch.finfo(dtype).eps) / 2


def product_roundoff(on: Device, dtype: torch.dtype) -> float:
    """Return the same for the factors of a matrix product, as the device declares them."""
    if dtype is torch.float32:
        return float(2.0**-on.placement.float32_product_bits)
    return roundoff(dtype)


def exact(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Allow no error: a value is moved or chosen, nothing is computed."""
    return torch.zeros_like(wanted)


def round_either_way(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Allow either neighbour: one operation that hardware has."""
    return 2 * roundoff(dtype) * wanted.abs() + torch.finfo(dtype).tiny


def normwise(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """A function of a few steps of which some cancel: relative to the largest value, too."""
    finite = wanted[torch.isfinite(wanted)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    steps = 32 if dtype is torch.float32 else 8
    return steps * roundoff(dtype) * (wanted.abs() + largest) + torch.finfo(dtype).tiny


def rounded_sum(terms: int, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum that float32 holds, whatever the type, and that is rounded to the type at its end.

    Args:
        terms: of each sum. Each may add an error, which has either sign: so their root counts.
        magnitude: sum of the terms' absolute values, which is what their errors are relative to.
    """
    kept = 4 * math.sqrt(max(terms, 1)) * roundoff(torch.float32)
    return (2 * roundoff(dtype) + kept) * magnitude + torch.finfo(dtype).tiny


def check_unbiased(found: Tensor, wanted: Tensor, what: str, most: float = MAX_BIAS) -> None:
    """Fail where errors lean to one side; too few values are passed over.

    Args:
        found, wanted: on the host; float64 is wanted.
        most: mean error in roundoffs of the type.
    """
    dtype = found.dtype
    counts = torch.isfinite(wanted) & (wanted.abs() > 1e3 * torch.finfo(dtype).tiny)
    if int(counts.sum()) < MIN_ELEMENTS:
        return
    errors = (found.double() - wanted)[counts] / wanted[counts].abs()
    # Towards zero, down and up are the three ways of rounding always to the same side.
    means = (errors * wanted[counts].sign()).mean(), errors.mean()
    mean = max((float(each) / roundoff(dtype) for each in means), key=abs)
    assert abs(mean) <= most, (
        f"{what}: errors lean to one side, by {mean:+.2f} roundoffs of {dtype} in the mean; "
        f"{most:.2f} is allowed: is it truncated instead of rounded?"
    )


def compare(found: Tensor, wanted: Tensor, allowed: Tensor, what: str) -> None:
    """Fail at the first element that is beyond its bound.

    Args:
        found: on the host, in the device's type.
        wanted: float64, or the integers or truths that must be met.
    """
    assert found.shape == wanted.shape, (
        f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    )
    if not found.dtype.is_floating_point or not wanted.dtype.is_floating_point:
        assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, expected {wanted.dtype}"
        same, allowed = found == wanted, torch.zeros(())
    else:
        rounded_to = wanted.to(found.dtype)  # which may be infinity
        got = found.double()
        same = torch.where(
            torch.isfinite(wanted) & torch.isfinite(rounded_to),
            (got - wanted).abs() <= allowed,
            (got == rounded_to.double()) | (got.isnan() & wanted.isnan()),
        )
    wrong = (~same).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        limit = float(allowed.expand_as(same)[at])
        raise AssertionError(
            f"{what}: {found[at].item()} at {list(at)}, expected {wanted[at].item()}; {len(wrong)} "
            f"of {same.numel()} values are wrong, {limit:.1g} is allowed"
        )


def on_host(tensor: Tensor) -> Tensor:
    """A copy that the host may read."""
    return tensor.detach().to(HOST_DEVICE)


def even_values(*shape: int, seed: int, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Float64 values evenly between two bounds, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


# -- layouts --------------------------------------------------------------------------------------


def _make_slice(values: Tensor) -> tuple[Tensor, View]:
    def view(whole: Tensor) -> Tensor:
        for dim, size in enumerate(values.shape):
            whole = whole.narrow(dim, dim + 1, size)
        return whole

    sizes = [size + dim + 2 for dim, size in enumerate(values.shape)]
    whole = torch.full(sizes, GUARD_VALUE).to(values.dtype)
    view(whole).copy_(values)
    return whole, view


def _make_stepped(values: Tensor) -> tuple[Tensor, View]:
    whole = torch.full((*values.shape[:-1], 2 * values.shape[-1]), GUARD_VALUE).to(values.dtype)
    whole[..., 1::2] = values
    return whole, lambda whole: whole[..., 1::2]


LAYOUTS: dict[str, Arrange] = {
    "contiguous": lambda values: (values, lambda whole: whole),
    "every second": _make_stepped,
    "transposed": lambda values: (
        values.transpose(0, -1).contiguous(), lambda whole: whole.transpose(0, -1)
    ),
    "sliced": _make_slice,
}  # fmt: skip
"""How inputs stand in memory."""
