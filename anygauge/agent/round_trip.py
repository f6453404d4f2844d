"""A collective round trip: real ranks on this machine join, sum tensors, and time it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from anygauge.agent import errand
from anygauge.interface import Check, Job, Outcome
from anygauge.registry import Registry

MODULE = "anygauge.agent.round_trip"
CHECK = "collective round trip"
SIZES = (1_024, 1_048_576, 67_108_864)
"""Bytes of float32 in a tensor."""
REPEATS = 5
MIB = 2**20


def measure(
    backend: str, options: Mapping[str, Any], ranks: int, timeout_s: float = 180.0
) -> Check:
    """Start `ranks` ranks on this machine and let them sum tensors of several sizes.

    Args:
        timeout_s: seconds that all of it may take.
    """
    remedy = f"anygauge env --backend {backend} --devices {ranks} shows the ranks' variables"
    try:
        result = errand.send(MODULE, "doctor", backend, options, ranks, timeout_s)
    except errand.ErrandError as error:
        return Check(name=CHECK, outcome=Outcome.FAIL, seen=str(error), remedy=remedy)
    return _judged(result, ranks, remedy)


def _judged(result: Mapping[str, Any], ranks: int, remedy: str) -> Check:
    lines = [
        f"{_size(one['bytes'])} in {one['seconds'] * 1e3:.2f} ms ({one['bytes_per_s'] / MIB:,.0f} "
        "MiB/s)"
        for one in result["sizes"]
    ]
    seen = f"{ranks} ranks, {result['library']}: " + ", ".join(lines)
    if result["wrong"]:
        return Check(
            name=CHECK,
            outcome=Outcome.FAIL,
            seen=f"{seen}; sums of {_size(result['wrong'][0])} are wrong",
            remedy=remedy,
        )
    return Check(name=CHECK, outcome=Outcome.PASS, seen=seen)


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


def run_rank(job: Job, rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """Join, sum, time; what rank 0 returns is the result.

    Returns:
        ``library``; ``sizes``: bytes, median seconds, and bytes a second that left this rank by
        the usual count for a ring (2 (n-1)/n of the tensor); ``wrong``: sizes with wrong sums.
    """
    import torch

    with Registry.load().create_backend(job.backend, job.backend_options) as backend:
        device = backend.open(local_rank)
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout_s=job.launch.collective_timeout_s,
            device=device,
            secret=job.token,
        )
        wanted = float(sum(range(1, world_size + 1)))
        sizes, wrong = [], []
        for size in SIZES:
            seconds = []
            for _ in range(REPEATS):
                tensor = torch.full((size // 4,), float(rank + 1), device=device)
                backend.placement.synchronize()
                backend.collectives.barrier()
                began = time.perf_counter()
                backend.collectives.all_reduce(tensor)
                backend.placement.synchronize()
                seconds.append(time.perf_counter() - began)
                if not bool((tensor == wanted).all()):
                    wrong.append(size)
            median = sorted(seconds)[REPEATS // 2]
            moved = 2 * (world_size - 1) / world_size * size
            sizes.append({"bytes": size, "seconds": median, "bytes_per_s": moved / median})
        found = backend.collectives.gather_objects(wrong)
        return {
            "library": backend.collectives.backend_name(device),
            "sizes": sizes,
            "wrong": sorted({size for each in found for size in each}),
        }


if __name__ == "__main__":
    sys.exit(errand.main(MODULE, run_rank, sys.argv[1:]))
