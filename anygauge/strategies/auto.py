"""The `auto` strategy: one of the others, by whether the model fits on every opened device.

Weights in 16 bits, and for what is trained a gradient, a master and two moments, are compared with
half of a device's memory; the other half is for activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from anygauge.interface import Setting
from anygauge.interface.strategy import BuildContext, Engine, Footprint, Strategy, Workload
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.strategies.ddp import Ddp
from anygauge.strategies.degrees import Degrees
from anygauge.strategies.footprint import numbers, trained_numbers
from anygauge.strategies.single import Single

BYTES_PER_WEIGHT = 2
BYTES_PER_TRAINED = 16
GIB = 2**30


def chosen(workload: Workload, memory: int | None) -> tuple[Strategy, str]:
    """The strategy for a workload, whose skeleton is there, and why it is that one.

    Args:
        memory: of the smallest device, in bytes; None where none says.
    """
    if workload.world_size == 1:
        return Single(), "there is one rank"
    if memory is None:
        return _default(), "the devices do not report how much memory they have"
    assert workload.skeleton is not None
    needed = BYTES_PER_WEIGHT * numbers(workload.skeleton.parameters())
    needed += BYTES_PER_TRAINED * trained_numbers(workload.skeleton)
    compared = f"weights and optimizer take {needed / GIB:.2f} GiB of the {memory / GIB:.1f} GiB"
    if 2 * needed < memory:
        return Ddp(Degrees()), f"{compared} that each rank has, less than half"
    return _default(), f"{compared} that each rank has, more than half"


def _default() -> Strategy:
    """That of a run file which names none."""
    registry = Registry.load()
    provided = registry.default_strategy()
    options = load_options(provided)
    return registry.strategy(provided.spec.name)(None if options is None else options())


class Auto:
    """Decides when the device is open."""

    description = "auto"

    def __init__(self, options: Any = None) -> None:
        """Args: options: the run file's section, which has no fields but the name."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Those of the default, which it may become; of one rank, none."""
        return () if workload.world_size == 1 else _default().settings(workload)

    def footprint(self, workload: Workload) -> Footprint:
        """Of the strategy that it becomes where devices do not say how much memory they have."""
        return chosen(workload, None)[0].footprint(workload)

    def build(self, context: BuildContext) -> Engine:
        """See `Strategy.build`; every rank decides alike."""
        factory = context.factory
        skeleton = factory.adapt(factory.skeleton())
        workload = dataclasses.replace(context.workload, skeleton=skeleton)
        strategy, why = chosen(workload, _memory(context))
        self.description = f"{strategy.description} (auto: {why})"
        return strategy.build(context)


def _memory(context: BuildContext) -> int | None:
    """What the smallest of all ranks has; those that share a host's have a part of it each."""
    stats = context.backend.placement.memory()
    ranks = context.workload.world_size
    mine = stats.limit
    if mine is not None and stats.kind == "process":
        mine //= ranks
    every = [mine] if ranks == 1 else context.backend.collectives.gather_objects(mine)
    return None if None in every else min(every)
