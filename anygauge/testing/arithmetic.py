"""Checks of long sums, conversions between types, and integers of 64 bits.

Expected values come from float64 or Python's integers on the host.
"""

from __future__ import annotations

import itertools
import math

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import compare, drawn, on_host, summed, types
from anygauge.testing.check import Opened, check

# -- sums -----------------------------------------------------------------------------------------


@check(
    "long sums keep their digits, over all and along each dimension",
    part="device",
    means="losses and gradient norms of large models would be wrong; look for sums that are kept "
    "in the inputs' type, and for counts of elements in too few bits",
)
def long_sums(on: Opened) -> None:
    for dtype in types(on):
        values = drawn(5, 2**14 + 3, seed=6, low=0.25, high=1).to(dtype)
        wide = values.double()
        there = values.to(on.device)
        across = values.t().contiguous().to(on.device)
        for what, found, wanted, terms in (
            ("mean over all", there.mean(), wide.mean(), wide.numel()),
            ("mean of the last dimension", there.mean(-1), wide.mean(-1), wide.shape[1]),
            ("mean of the first dimension", across.mean(0), wide.mean(-1), wide.shape[1]),
            ("norm", torch.linalg.vector_norm(there), wide.norm(), wide.numel()),
            ("sum in float32", there.float().sum(), wide.sum(), wide.numel()),
            ("sum to float32", there.sum(-1, dtype=torch.float32), wide.sum(-1), wide.shape[1]),
            ("logsumexp", there.logsumexp(-1), wide.logsumexp(-1), wide.shape[1]),
            ("sum", there[:, :9000].sum(-1), wide[:, :9000].sum(-1), 9000),
            ("sum over rows", across[:9000].sum(0), wide[:, :9000].sum(-1), 9000),
        ):
            allowed = 2 * summed(terms, wanted.abs(), found.dtype)
            compare(on_host(found), wanted, allowed, f"{what} of {terms} x {dtype}")
        total = on_host(there[0].float().cumsum(0))
        wanted = wide[0].cumsum(0)
        allowed = 2 * summed(wide.shape[1], wanted, torch.float32)
        compare(total, wanted, allowed, f"cumsum of {wide.shape[1]} x {dtype} in float32")


@check(
    "sums whose parts do not fit the type fit where the whole does, and become infinite if not",
    part="device",
    means="in float16 a step would be skipped without need, or an overflow stay unseen; look for "
    "accumulators in the inputs' type and for results that are clamped to the largest number",
)
def overflow_is_of_the_result(on: Opened) -> None:
    for dtype in types(on):
        largest = torch.finfo(dtype).max
        half = torch.full((1, 64), largest / 2, dtype=dtype)
        there = half.to(on.device)
        for what, result, wanted in (
            ("a product of matrices", there @ torch.ones_like(there).t(), math.inf),
            ("a sum", there.sum(), math.inf),
            ("a number times 4", there[0, 0] * 4, math.inf),
            ("a number times -4", there[0, 0] * -4, -math.inf),
            ("a sum of two and one more", there[0, 0] + there[0, 1] + there[0, 2], math.inf),
            ("its square", there[0, 0].pow(2), math.inf),
            ("a number that just fits", there[0, 0] * 2, largest),
        ):
            got = float(on_host(result))
            assert got == wanted, f"{what} of {dtype} at {largest:.4g}: {got}, expected {wanted}"
        if dtype is torch.float32:
            continue
        beyond = torch.tensor([3.0, -3.0]) * largest if dtype is torch.float16 else None
        if beyond is not None:
            found = on_host(beyond.to(on.device).to(dtype)).tolist()
            assert found == [math.inf, -math.inf], f"{beyond.tolist()} in {dtype}: {found}"
            # The first forty terms make 80 000, all of them 32 000.
            sign = torch.ones(64, 1, dtype=dtype)
            sign[40:] = -1
            a, b = torch.full((1, 64), 2000.0, dtype=dtype).to(on.device), sign.to(on.device)
            for what, result in (("product", a @ b), ("sum", (a * b.t()).sum())):
                got = float(on_host(result))
                assert got == 32000, f"the {what} of 40 x 2000 and 24 x -2000 in {dtype}: {got}"


# -- conversions and integers ---------------------------------------------------------------------


def _nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 values that the type has, the nearest to others; of two the one that ends in 0."""
    fraction, exponent = torch.frexp(values.double())
    scale = 1 / torch.finfo(dtype).eps * 2  # fractions are from a half to 1
    return torch.ldexp(torch.round(fraction * scale) / scale, exponent)


@check(
    "conversions between types round to nearest, ties to even, and cut towards zero to integers",
    part="device",
    means="weights would drift when they are stored in the lower type; look at the conversion "
    "kernel: cutting bits off is the usual shortcut",
)
def conversions_round(on: Opened) -> None:
    for dtype in types(on)[1:]:
        values = drawn(2**16 + 3, seed=8, low=0.25, high=2).float()
        values[::2] *= -1
        step = torch.finfo(dtype).eps
        ties = 1 + step * (torch.arange(64) + 0.5)
        values = torch.cat((values, ties, -ties, ties.flip(0) * 2))
        for what, view in (
            ("", lambda whole: whole),
            (", with an offset", lambda whole: whole[3:-2]),
            (", every second", lambda whole: whole[1::2]),
            (", transposed", lambda whole: whole[: 2**16].reshape(256, 256).t()),
        ):
            source, seen = view(values), view(values.to(on.device))
            found = on_host(seen.to(dtype))
            wanted = _nearest(source, dtype)
            same = found.double() == wanted
            at = tuple((~same).nonzero()[0].tolist()) if not bool(same.all()) else ()
            assert not at, (
                f"float32 to {dtype}{what}: {source[at].item()!r} became {found[at].item()!r}, "
                f"expected {wanted[at].item()!r}; {int((~same).sum())} differ"
            )
            back = on_host(seen.to(dtype).float())
            assert torch.equal(back.double(), wanted), f"{dtype} to float32{what}: values differ"
            lower = view(_nearest(values, dtype).to(dtype).to(on.device))
            back = on_host(lower.float()).double()
            assert torch.equal(back, wanted), f"a view of {dtype} to float32{what}: values differ"
    reals = torch.tensor([-2.7, -0.5, 0.5, 1.5, 2.7, 1e6 + 0.5])
    whole = on_host(reals.to(on.device).long()).tolist()
    assert whole == [-2, 0, 0, 1, 2, 10**6], f"{reals.tolist()} to integers gave {whole}"
    truths = on_host(torch.tensor([0.0, -0.0, 1e-30, -3.0]).to(on.device).bool()).tolist()
    assert truths[:2] + truths[3:] == [False, False, True], f"numbers became truths {truths}"
    back_to = on_host(torch.tensor([True, False]).to(on.device).float()).tolist()
    assert back_to == [1, 0], f"truths became {back_to}"


@check(
    "integers of 64 bits keep all of them: values, sums, comparisons and conversions",
    part="device",
    means="counts of tokens, positions and hashes would be wrong once they are large; look for "
    "integers that are computed in 32 bits or as floating point, which ends at 2^24 or 2^53",
)
def large_integers(on: Opened) -> None:
    values = [2**31, 2**31 + 1, -(2**31) - 1, 2**24 + 1, 2**53 + 1, -(2**53) - 1, 2**62 + 3, 7]

    def put(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(on.device)

    there = put(values)
    turned = values[::-1]
    order = sorted(range(len(values)), key=values.__getitem__)
    running = list(itertools.accumulate(values))
    for what, found, wanted in (
        ("copied", there, values),
        ("+ 1", there + 1, [v + 1 for v in values]),
        ("* 1", there * 1, values),
        ("* 3", put(values[:6]) * 3, [3 * v for v in values[:6]]),
        ("- another", there - there.flip(0), [a - b for a, b in zip(values, turned, strict=True)]),
        ("negated", -there, [-v for v in values]),
        ("// 2", torch.div(there, 2, rounding_mode="floor"), [v // 2 for v in values]),
        ("% 1000", there % 1000, [v % 1000 for v in values]),
        ("summed", there.sum(), sum(values)),
        ("summed up to each", there.cumsum(0), running),
        ("the largest", there.max(), max(values)),
        ("the smallest", there.amin(), min(values)),
        ("where the largest is", there.argmax(), values.index(max(values))),
        ("sorted", there.sort()[0], sorted(values)),
        ("order", there.argsort(), order),
        ("selected", there[put([5, 0, 5])], [values[5], values[0], values[5]]),
        ("gathered", there.gather(0, put([4, 6])), [values[4], values[6]]),
        ("chosen", torch.where(there > 0, there, 0), [max(v, 0) for v in values]),
        ("clamped", there.clamp(max=2**53 + 1), [min(v, 2**53 + 1) for v in values]),
        ("differs from its neighbour", there == there - 1, [False] * len(values)),
        ("filled", torch.full((2,), 2**53 + 1, device=on.device), [2**53 + 1] * 2),
        ("made as a range", torch.arange(2**53 + 1, 2**53 + 4, device=on.device),
         [2**53 + 1, 2**53 + 2, 2**53 + 3]),
        ("added at indices", put([0, 5]).index_add_(0, put([1, 1]), put([2**53, 1])),
         [0, 2**53 + 6]),
        ("scattered", put([0, 0]).scatter_add_(0, put([1, 1]), put([2**53, 1])), [0, 2**53 + 1]),
        ("a million of 2^31 + 1 summed", put([2**31 + 1]).expand(10**6).sum(),
         10**6 * (2**31 + 1)),
        ("truths counted", (put([1]).expand(2**18 + 1) > 0).sum(), 2**18 + 1),
        ("small ones of 32 bits summed", put([2**30]).int().expand(9).sum(), 9 * 2**30),
    ):  # fmt: skip
        got = found.to(HOST_DEVICE).tolist()
        assert got == wanted, f"int64 {what}: {got}, expected {wanted}"
