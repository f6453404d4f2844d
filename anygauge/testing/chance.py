"""Checks of random numbers: their distribution, their seeds, and the state that a run saves.

A bound here is six standard deviations: a sound device misses one in five hundred million.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as nn

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import compare, on_host, rounded, types
from anygauge.testing.check import Opened, check

DRAWN = 2**17 + 3
MANY = 2**22
"""Elements of a layer's activations, of which a generator counts blocks."""
SIGMAS = 6.0
LAGS = (1, 2, 3, 4, 8, 32, 64, 128, 256, 1024, 4096, 2**16)
"""Distances at which numbers are compared: blocks of a device often begin anew at one of them."""


def _close(found: float, wanted: float, deviation: float, count: int, what: str) -> None:
    """Fail unless a mean of `count` values is `wanted`."""
    most = SIGMAS * deviation / math.sqrt(count)
    assert abs(found - wanted) <= most, (
        f"{what} is {found:.5f}, expected {wanted:.5f}; {most:.5f} away is allowed of {count}"
    )


def _unrelated(first: torch.Tensor, second: torch.Tensor, what: str) -> None:
    """Fail where two runs of numbers go together."""
    a, b = (each.double() - each.double().mean() for each in (first, second))
    found = float((a * b).sum() / (a.norm() * b.norm()))
    _close(found, 0.0, 1.0, a.numel(), f"{what}: the correlation")


# -- distributions --------------------------------------------------------------------------------


@check(
    "dropout drops at its rate, scales what it keeps, and its gradient has the same mask",
    part="device",
    means="a model would be regularised too much or not at all, or get gradients of values that "
    "it dropped; look at the fused dropout, at how it draws for each block, and at its backward",
)
def dropout_is_sound(on: Opened) -> None:
    on.placement.seed(21)
    host = torch.where(torch.arange(DRAWN) % 2 == 0, 1.5, -0.75)
    for dtype, rate in itertools.product(types(on), (0.1, 0.5)):
        what = f"dropout of {rate} in {dtype}"
        x = host.to(dtype).to(on.device, copy=True).requires_grad_()
        out = nn.dropout(x, rate, training=True)
        out.backward(torch.full_like(out, 2.0))
        assert x.grad is not None
        on.placement.synchronize()  # before either is read: a graph must not draw twice
        found, grad = on_host(out), on_host(x.grad)
        kept = found != 0
        _close(float(kept.double().mean()), 1 - rate, math.sqrt(rate * (1 - rate)), DRAWN, what)
        wanted = torch.where(kept, host.double() / (1 - rate), 0.0)
        compare(found, wanted, 2 * rounded(wanted, dtype), what)
        wanted = torch.where(kept, 2.0 / (1 - rate), 0.0).double()
        compare(grad, wanted, 2 * rounded(wanted, dtype), f"the gradient of {what}")
        for lag in LAGS:
            _unrelated(kept[lag:], kept[:-lag], f"{what}, {lag} apart")
        again = on_host(nn.dropout(x.detach(), rate, training=True)) != 0
        _unrelated(kept, again, f"{what}, two calls in a row")
        still = on_host(nn.dropout(x.detach(), rate, training=False))
        assert torch.equal(still, host.to(dtype)), f"{what} drops in evaluation, too"
    rows = on_host(nn.dropout(torch.ones(257, 301, device=on.device).t(), 0.5)) != 0
    _close(float(rows.double().mean()), 0.5, 0.5, rows.numel(), "dropout of a transposed tensor")
    whole = on_host(nn.dropout(torch.ones(9, device=on.device), 0.0, training=True))
    assert whole.eq(1).all(), f"dropout of nothing gave {whole.tolist()}"


@check(
    "random numbers have the distribution that their name promises, each independent of others",
    part="device",
    means="weights would begin at other sizes, or in patterns; look at how the device turns bits "
    "into numbers, and at what each block of threads starts from",
)
def random_numbers_are_sound(on: Opened) -> None:
    on.placement.seed(22)

    def made() -> torch.Tensor:
        return torch.zeros(DRAWN, device=on.device)

    # Means of the powers of even numbers from 0 to 1, and of normal ones.
    even = [1 / (power + 1) for power in range(9)]
    normal = [1.0, 0, 1, 0, 3, 0, 15, 0, 105]
    trials: list[tuple[str, torch.Tensor, list[float]]] = [
        ("rand", torch.rand(DRAWN, device=on.device), even),
        ("uniform_(-1, 3)", (made().uniform_(-1, 3) + 1) / 4, even),
        ("randn", torch.randn(DRAWN, device=on.device), normal),
        ("normal_(2, 3)", (made().normal_(2, 3) - 2) / 3, normal),
        *(
            (f"randn in {each}", torch.randn(DRAWN, device=on.device, dtype=each), normal[:5])
            for each in types(on)[1:]
        ),
    ]
    for what, drawn, means in trials:
        values = on_host(drawn).double()
        for power in range(1, (len(means) + 1) // 2):
            deviation = math.sqrt(means[2 * power] - means[power] ** 2)
            _close(float((values**power).mean()), means[power], deviation, DRAWN, f"{what}^{power}")
        for lag in LAGS:
            _unrelated(values[lag:], values[:-lag], f"{what}, {lag} apart")
        if means is even:
            assert 0 <= float(values.min()) <= float(values.max()) <= 1, f"{what} leaves its bounds"
            assert len(values.unique()) > 0.98 * DRAWN, f"{what} repeats itself"
        elif len(means) > 5:
            assert 4 < float(values.abs().max()) < 7, f"the largest of {what}: {values.abs().max()}"
    dice = on_host(torch.randint(-2, 5, (DRAWN,), device=on.device))
    for number in range(-2, 5):
        share = float((dice == number).double().mean())
        _close(share, 1 / 7, 0.35, DRAWN, f"the share of {number} in randint(-2, 5)")
    assert int(dice.min()) >= -2 and int(dice.max()) <= 4, "randint leaves its bounds"
    truths = on_host(torch.bernoulli(torch.full((DRAWN,), 0.3, device=on.device)))
    _close(float(truths.double().mean()), 0.3, 0.46, DRAWN, "bernoulli of 0.3")


@check(
    "neighbouring seeds, as ranks have them, give numbers that have nothing in common",
    part="device",
    means="ranks would drop the same values, or each the next one's; look at a seed that is cut, "
    "rounded, or used as the place to begin in one and the same run of numbers",
)
def seeds_of_ranks_differ(on: Opened) -> None:
    def drawn(seed: int, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        on.placement.seed(seed)
        return on_host(draw()).reshape(-1)

    draws = {
        "rand": lambda: torch.rand(4099, device=on.device),
        "randn": lambda: torch.randn(4099, device=on.device),
        "dropout": lambda: nn.dropout(torch.ones(4099, device=on.device), 0.5),
    }
    for name, draw in draws.items():
        for base in (0, 42 * 100_003, 2**62):
            seeds = [base + rank for rank in range(4)]
            found = [drawn(seed, draw) for seed in seeds]
            for (s, a), (t, b) in itertools.combinations(zip(seeds, found, strict=True), 2):
                for lag in (0, 1, 2, 4):
                    what = f"{name} with seeds {s} and {t}, {lag} apart"
                    _unrelated(a[lag:], b[: b.numel() - lag], what)
                    _unrelated(b[lag:], a[: a.numel() - lag], what)


# -- states ---------------------------------------------------------------------------------------


def _draws(on: Opened) -> Mapping[str, Callable[[], torch.Tensor]]:
    """Operations that draw, each an odd number, so that the next begins within a block."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=on.device)

    return {
        "rand": lambda: torch.rand(37, device=on.device),
        "randn": lambda: torch.randn(37, device=on.device),
        "randint": lambda: torch.randint(0, 10**6, (37,), device=on.device),
        "randperm": lambda: torch.randperm(101, device=on.device),
        "normal_": lambda: ones(37).normal_(1, 2),
        "uniform_": lambda: ones(37).uniform_(2, 4),
        "bernoulli_": lambda: ones(101).bernoulli_(0.5),
        "multinomial": lambda: torch.multinomial(ones(50), 37, replacement=True),
        "exponential_": lambda: ones(37).exponential_(),
        "dropout": lambda: nn.dropout(ones(101), 0.5),
        "dropout of a view": lambda: nn.dropout(ones(11, 13).t()[2:], 0.5),
        f"dropout of {MANY} elements": lambda: nn.dropout(ones(MANY), 0.5),
        f"rand of {MANY} elements": lambda: torch.rand(MANY, device=on.device),
        "the host's rand": lambda: torch.rand(37),
        "the host's dropout": lambda: nn.dropout(torch.ones(101), 0.5),
    }


@check(
    "every generator that an operation draws from is in the saved state, a copy that serves a "
    "backend that was just made, too",
    part="device",
    means="a resumed run would not be the one that was interrupted; look for operations with a "
    "generator of their own, for numbers that are drawn in advance, and for states that live in "
    "the Python object or that change after they were handed out",
)
def every_generator_is_saved(on: Opened) -> None:
    draws = _draws(on)
    on.placement.seed(23)
    for name, draw in draws.items():
        same = torch.equal(on_host(draw()), on_host(draw()))
        assert not same, f"{name} gives the same twice in a row"
    state = on.placement.rng_state()
    for key, value in state.items():
        assert value.device.type == HOST_DEVICE and value.dtype == torch.uint8, (
            f"{key}: a state is bytes on the host, not {value.dtype} on {value.device}"
        )
    kept = {key: value.clone() for key, value in state.items()}
    # Each twice: the second begins where the first ended, within a block.
    wanted = {name: [on_host(draw()) for _ in range(2)] for name, draw in draws.items()}
    later = on.placement.rng_state()
    for key, value in state.items():
        assert torch.equal(value, kept[key]), f"{key}: drawing changed the state that was saved"
    changed = [key for key in kept if not torch.equal(kept[key], later[key])]
    assert changed, "drawing changes nothing in the state that is saved"
    other = on.fresh()
    other.open(0)
    try:
        for who, placement in (("", on.placement), ("on a backend just made, ", other.placement)):
            placement.seed(1)
            placement.set_rng_state(kept)
            for name, draw in draws.items():
                for number in range(2):
                    same = torch.equal(on_host(draw()), wanted[name][number])
                    assert same, f"{who}{name}: other numbers after the state was put back"
            again = placement.rng_state()
            assert again.keys() == later.keys(), f"{who}it saves {sorted(again)}"
            for key, value in again.items():
                assert torch.equal(value, later[key]), f"{who}{key}: its state is another then"
    finally:
        other.close()
    # Seeded again, everything begins where it began.
    found = []
    for _ in range(2):
        on.placement.seed(24)
        found.append([on_host(draw()) for draw in draws.values()])
    for name, first, second in zip(draws, *found, strict=True):
        assert torch.equal(first, second), f"{name}: other numbers after the same seed"


@check(
    "a state of the wrong size or type, or without a generator's name, is refused",
    part="device",
    means="a damaged checkpoint would be taken, and the run go on with other numbers; look at "
    "states that are copied without a look at their length",
)
def wrong_states_are_refused(on: Opened) -> None:
    on.placement.seed(26)
    state = {key: value.clone() for key, value in on.placement.rng_state().items()}
    assert state, "rng_state() is empty: nothing would be saved"
    for key, value in state.items():
        assert value.numel() > 0, f"{key}: a state of no bytes"
        wrong = {
            "half as long": {**state, key: value[: value.numel() // 2].clone()},
            "longer by 8 bytes": {**state, key: torch.cat((value, value[:8]))},
            "empty": {**state, key: value[:0].clone()},
            "of float32": {**state, key: value.float()},
            "missing": {name: each for name, each in state.items() if name != key},
        }
        for what, given in wrong.items():
            taken = False
            with contextlib.suppress(Exception):
                on.placement.set_rng_state(given)
                taken = True
            on.placement.set_rng_state(state)
            assert not taken, f"a state whose {key!r} is {what} was taken without a word"
