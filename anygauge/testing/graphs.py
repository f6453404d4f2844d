"""Checks on one opened device: graphs, compilation and the kernels that are installed for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch

from anygauge.interface import HOST_DEVICE, Phase
from anygauge.registry import Registry
from anygauge.testing.check import NotAsked, Opened, check
from anygauge.testing.kernel_trials import KERNEL_TRIALS

LARGEST_LIMIT = 10_000
"""Operations per graph up to which the limit is tried."""
COUNTED_WITHIN_S = 2.0
"""Seconds within which a graph that ended must have been counted."""


@check(
    "a graph ends at mark_step where they accumulate, and at its limit: its counters show it",
    part="device",
    means="graphs would grow until memory is exhausted, or a long one never be compiled; look at "
    "mark_step, at the option that carries the limit to the vendor's software, and at counters "
    "that count nothing",
)
def graphs_end(on: Opened) -> None:
    graph = on.backend.graph
    for size in (3, 4, 5):  # a graph of shapes that came before may need no compilation
        value = torch.ones(size, size, device=on.device) * 2 + 1
        before = dict(graph.counters())
        graph.mark_step(Phase.UPDATE)
        counted = _counted(on, before, COUNTED_WITHIN_S if graph.accumulates else 0.0)
        assert counted == graph.accumulates, (
            f"graph.accumulates is {graph.accumulates}, and graph.mark_step changes "
            f"{'some' if counted else 'none'} of graph.counters() ({before or 'there are none'})"
        )
        assert float(value.sum().to(HOST_DEVICE)) == 3 * size * size
    limit = graph.limit
    if limit is None and not graph.accumulates:
        raise NotAsked("graph.accumulates is False, and graph.limit None: there is none to end")
    if limit is None or limit > LARGEST_LIMIT:
        return  # there is none, or it takes too long to reach
    on.placement.synchronize()
    value, before = torch.ones(3, 7, device=on.device), dict(graph.counters())
    for _ in range(3 * limit):
        value = value + 1
    assert _counted(on, before), (
        f"{3 * limit} operations changed none of graph.counters(), though a graph holds {limit}"
    )
    assert float(value[0, 0].to(HOST_DEVICE)) == 3 * limit + 1


def _counted(on: Opened, before: Mapping[str, float], within_s: float = COUNTED_WITHIN_S) -> bool:
    """Whether a counter has grown, or grows soon: graphs may be compiled in the background."""
    until = time.monotonic() + within_s
    while True:
        if any(value > before.get(name, 0) for name, value in on.backend.graph.counters().items()):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)


@check(
    "every installed kernel for it agrees with float64 on the host",
    part="device",
    means="a run with the vendor's kernel would go another way; look in the kernel named, at "
    "masks and incomplete blocks",
)
def kernels_agree(on: Opened) -> None:
    from anygauge.kernels.choose import KernelChoice, choose_kernels, load_kernel

    registry = Registry.load(os.environ)
    chosen = choose_kernels(registry, on.backend, {})
    tried = []
    for provided in registry.kernels:
        spec = provided.spec
        serves = not spec.device_types or on.device.type in spec.device_types
        if not serves or spec.operation not in KERNEL_TRIALS or spec.missing():
            continue
        choice = KernelChoice(
            operation=spec.operation, name=spec.name, reason="tried", provided=provided
        )
        table = {**chosen, spec.operation: choice}
        KERNEL_TRIALS[spec.operation](on, load_kernel(table, spec.operation), spec.name)
        tried.append(spec.name)
    if not tried:
        raise NotAsked(f"none is installed for {', '.join(sorted(KERNEL_TRIALS))}")
