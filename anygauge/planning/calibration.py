"""Measures what this machine's cards reach: ``anygauge plan --calibrate``.

Real ranks measure, one on each card, at the same time, in the environment of a run's ranks.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anygauge.agent import local_job
from anygauge.config.schema import AUTO_ORDER
from anygauge.interface import Backend, Job, Phase

MODULE = "anygauge.planning.calibration"
REPEATS = 7
LONG_S = 0.05  # that a measured call takes at least, as far as the sizes allow
SIDES = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
BYTES = (2**22, 2**24, 2**26, 2**28)  # of a tensor that is copied, or that a rank gives to a gather
Work = tuple[float, Callable[[], object]]  # operations or bytes, and the call that handles them


def measure(backend: str, ranks: int) -> dict[str, Any]:
    """What each of so many ranks reaches, as `anygauge.interface.Card` names it.

    Raises:
        LocalJobError: the ranks failed.
    """
    return local_job.run(MODULE, "calibration", backend, {}, ranks, timeout_s=600.0)


def run_rank(job: Job, rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """Measure; returns the figures of rank 0: bytes per second, operations per second, seconds."""
    with local_job.opened(job, rank, world_size, local_rank) as backend:
        device, collectives = backend.placement.device, backend.collectives

        def product(kind: str, side: int) -> Work:
            square = torch.randn(side, side, device=device).to(getattr(torch, kind))
            return 2 * side**3, lambda: square @ square

        def addition(size: int) -> Work:
            one, two, total = torch.ones(3, size // 4, device=device)
            return 3 * size, lambda: torch.add(one, two, out=total)

        def gather(size: int) -> Work:
            one = torch.ones(size // 4, device=device)
            return (world_size - 1) * size, lambda: collectives.all_gather(one)

        # float32 is not a capability, since all compute in it.
        kinds = [kind for kind in AUTO_ORDER if kind == "float32" or backend.support(kind)]
        matmul = {kind: _rate(backend, SIDES, partial(product, kind)) for kind in kinds}
        found: dict[str, Any] = {"matmul": matmul, "copy": _rate(backend, BYTES, addition)}
        if world_size > 1:
            one = torch.zeros(1, device=device)
            found["call"] = _seconds(backend, lambda: collectives.all_reduce(one), 10 * REPEATS)
            found["exchange"] = _rate(backend, BYTES, gather)
        return found


def _rate(backend: Backend, sizes: tuple[int, ...], of: Callable[[int], Work]) -> float:
    """Per second, at the first of the sizes that takes long enough, or else the last."""
    for size in sizes:
        amount, work = of(size)
        # All ranks must agree which size is the last.
        if max(backend.collectives.gather_objects(_seconds(backend, work, 1))) >= LONG_S:
            break
    return amount / _seconds(backend, work, REPEATS)


def _seconds(backend: Backend, work: Callable[[], object], repeats: int) -> float:
    """Of one call, where all ranks do it at once: a median; the first is not counted."""
    taken = []
    for _ in range(repeats + 1):
        backend.placement.synchronize()
        backend.collectives.barrier()
        began = time.perf_counter()
        work()
        backend.graph.mark_step(Phase.UPDATE)
        backend.placement.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    sys.exit(local_job.main(MODULE, run_rank, sys.argv[1:]))
