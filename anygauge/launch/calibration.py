"""Measures what this machine's cards reach: ``anygauge plan --calibrate``.

Real ranks measure, one on each card, at the same time, in the environment of a run's ranks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from anygauge.config.schema import AUTO_ORDER
from anygauge.interface import Backend
from anygauge.launch import local_job

MODULE = "anygauge.launch.calibration"
REPEATS = 7
LONG_S = 0.05  # that a measured call takes at least, as far as the sizes allow
SIDES = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
BYTES = (2**22, 2**24, 2**26, 2**28)  # of a tensor that is copied, or that a rank gives to a gather


def measure(backend: str, ranks: int) -> dict[str, Any]:
    """What each of so many ranks reaches, as `anygauge.interface.Card` names it.

    Raises:
        LocalJobError: the ranks failed.
    """
    return local_job.run(MODULE, backend, ranks, timeout_s=600.0)


def run_rank(backend: Backend, rank: int, world_size: int) -> dict[str, Any]:
    """Measure; returns the figures of rank 0: bytes per second, operations per second, seconds."""
    import torch

    device, collectives = backend.placement.device, backend.collectives

    def seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Of one call, where all ranks do it at once: a median; the first is not counted."""
        taken = [local_job.seconds(backend, work) for _ in range(repeats + 1)]
        return statistics.median(taken[1:])

    def rate(sizes: tuple[int, ...], work_of: Callable[[int], Callable[[], object]]) -> float:
        """Of a size per second, at the first that takes long enough, or else the last."""
        for size in sizes:
            work = work_of(size)
            # All ranks must agree which size is the last.
            if max(collectives.gather_objects(seconds(work, 1))) >= LONG_S:
                break
        return size ** (3 if sizes is SIDES else 1) / seconds(work)

    def product(kind: str, side: int) -> Callable[[], object]:
        square = torch.randn(side, side, device=device).to(getattr(torch, kind))
        return lambda: square @ square

    def addition(size: int) -> Callable[[], object]:
        one, two, total = torch.ones(3, size // 4, device=device)
        return lambda: torch.add(one, two, out=total)

    def gather(size: int) -> Callable[[], object]:
        one = torch.ones(size // 4, device=device)
        return lambda: collectives.all_gather(one)

    # float32 is not a capability, since all compute in it.
    kinds = [kind for kind in AUTO_ORDER if kind == "float32" or backend.support(kind)]
    found: dict[str, Any] = {"matmul": {k: 2 * rate(SIDES, partial(product, k)) for k in kinds}}
    found["copy"] = 3 * rate(BYTES, addition)
    if world_size > 1:
        one = torch.zeros(1, device=device)
        found["call"] = seconds(lambda: collectives.all_reduce(one), 10 * REPEATS)
        found["exchange"] = (world_size - 1) * rate(BYTES, gather)
    return found


if __name__ == "__main__":
    sys.exit(local_job.main(run_rank, sys.argv[1:]))
