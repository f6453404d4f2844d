"""Checks of random numbers: dropout, seeds, and the state that a run saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as nn

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import on_host
from anygauge.testing.check import Device, check

MANY = 2**22
"""Elements of a layer's activations, of which a generator counts blocks."""
LARGE, RATE = f"dropout of {MANY} elements", 0.1
SIGMAS = 6.0
"""Standard deviations that a share may be off: a sound device misses one in 500 million."""


def _drawing_calls(on: Device) -> Mapping[str, Callable[[], torch.Tensor]]:
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
        LARGE: lambda: nn.dropout(ones(MANY), RATE),
        "the host's dropout": lambda: nn.dropout(torch.ones(101), 0.5),
    }


@check(
    "every generator that an operation draws from is in the saved state, a copy that serves a "
    "backend that was just made, too; seeds repeat it, and neighbouring ones differ; dropout has "
    "its rate and scale",
    part="device",
    means="a resumed run would not be the one that was interrupted, or ranks drop the same values; "
    "look for operations with a generator of their own, for numbers that are drawn in advance, for "
    "states that change after they were handed out, and for a seed that is cut or rounded",
)
def every_generator_is_saved(on: Device) -> None:
    draws = _drawing_calls(on)
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
    dropped, found = wanted[LARGE] == 0, wanted[LARGE].unique()
    most = SIGMAS * math.sqrt(RATE * (1 - RATE) / dropped.numel())
    share = float(dropped.double().mean())
    assert abs(share - RATE) <= most, f"dropout of {RATE} drops {share:.5f} of {dropped.numel()}"
    torch.testing.assert_close(found, torch.tensor([0.0, 1 / (1 - RATE)]), msg="dropout's scale")
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
