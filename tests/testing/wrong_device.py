"""Wrong backends that checks of the kit's part `device` find: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant


@mutant("the device is not seeded", part="device", check="seeds_count", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)


@mutant("softmax over the wrong dimension", part="device", check="float32_arithmetic", base="sim")
def _(on: Wrong) -> None:
    @on.operation("_softmax")
    def softmax(usual: Any, x: Any, dim: int, half_to_float: bool) -> Any:
        return usual(x, 0, half_to_float)
