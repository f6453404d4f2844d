"""Checks of random numbers: dropout, seeds, and the state that a run saves."""

from __future__ import annotations

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
"""Standard deviations that a share may be off: a sound device misses one in 500 million."""


@check(
    "dropout drops at its rate, scales what it keeps, and its gradient has the same mask",
    part="device",
    means="a model would be regularised too much or not at all, or get gradients of values that "
    "it dropped; look at the fused dropout, at how it draws for each block, and at its backward",
)
def dropout_is_sound(on: Opened) -> None:
    on.placement.seed(21)
    for dtype, rate in itertools.product(types(on), (0.1, 0.5)):
        x = torch.ones(DRAWN, dtype=dtype, device=on.device).requires_grad_()
        out = nn.dropout(x, rate, training=True)
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        on.placement.synchronize()  # before either is read: a graph must not draw twice
        kept = on_host(out) != 0
        share, most = float(kept.double().mean()), SIGMAS * math.sqrt(rate * (1 - rate) / DRAWN)
        assert abs(share - (1 - rate)) <= most, f"dropout of {rate} in {dtype} keeps {share:.5f}"
        wanted = kept.double() / (1 - rate)
        for what, found in (("dropout", out), ("the gradient of dropout", x.grad)):
            allowed = 2 * rounded(wanted, dtype)
            compare(on_host(found), wanted, allowed, f"{what} of {rate} in {dtype}")


# -- states ---------------------------------------------------------------------------------------


def _draws(on: Opened) -> Mapping[str, Callable[[], torch.Tensor]]:
    """Operations that draw, each an odd number, so that the next begins within a block."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=on.device)

    return {
        "rand": lambda: torch.rand(37, device=on.device),
        "randint": lambda: torch.randint(0, 10**6, (37,), device=on.device),
        "randperm": lambda: torch.randperm(101, device=on.device),
        "normal_": lambda: ones(37).normal_(1, 2),
        "uniform_": lambda: ones(37).uniform_(2, 4),
        "bernoulli_": lambda: ones(101).bernoulli_(0.5),
        "multinomial": lambda: torch.multinomial(ones(50), 37, replacement=True),
        "dropout of a view": lambda: nn.dropout(ones(11, 13).t()[2:], 0.5),
        f"dropout of {MANY} elements": lambda: nn.dropout(ones(MANY), 0.5),
        "the host's dropout": lambda: nn.dropout(torch.ones(101), 0.5),
    }


@check(
    "every generator that an operation draws from is in the saved state, a copy that serves a "
    "backend that was just made, too; seeds repeat it, and neighbouring ones differ",
    part="device",
    means="a resumed run would not be the one that was interrupted, or ranks drop the same values; "
    "look for operations with a generator of their own, for numbers that are drawn in advance, for "
    "states that change after they were handed out, and for a seed that is cut or rounded",
)
def every_generator_is_saved(on: Opened) -> None:
    draws = _draws(on)
    on.placement.seed(23)

    def drawn() -> dict[str, torch.Tensor]:
        # Each twice: the second begins where the first ended, within a block.
        twice = {name: [on_host(draw()) for _ in range(2)] for name, draw in draws.items()}
        for name, (first, second) in twice.items():
            assert not torch.equal(first, second), f"{name} gives the same twice in a row"
        return {name: torch.stack(each) for name, each in twice.items()}

    def repeats(wanted: Mapping[str, torch.Tensor], what: str) -> None:
        for name, found in drawn().items():
            assert torch.equal(found, wanted[name]), f"{name}: other numbers {what}"

    drawn()
    state = on.placement.rng_state()
    for key, value in state.items():
        assert value.device.type == HOST_DEVICE and value.dtype == torch.uint8, (
            f"{key}: a state is bytes on the host, not {value.dtype} on {value.device}"
        )
    kept = {key: value.clone() for key, value in state.items()}
    wanted, later = drawn(), on.placement.rng_state()
    for key, value in state.items():
        assert torch.equal(value, kept[key]), f"{key}: drawing changed the state that was saved"
    changed = any(not torch.equal(kept[key], later[key]) for key in kept)
    assert changed, "drawing changes nothing in the state that is saved"
    other = on.fresh()
    other.open(0)
    try:
        for placement, who in ((on.placement, ""), (other.placement, " on a backend just made")):
            placement.seed(1)
            placement.set_rng_state(kept)
            repeats(wanted, f"after the state was put back{who}")
    finally:
        other.close()
    on.placement.seed(24)
    wanted = drawn()
    on.placement.seed(24)
    repeats(wanted, "after the same seed")
    on.placement.seed(25)
    for name, found in drawn().items():
        same = torch.equal(found, wanted[name])
        assert not same, f"{name}: the same numbers after seeds 24 and 25"
