"""A collective of real ranks that this machine starts: its sums and its speed."""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import Any

from anygauge.interface import Backend, Check, Outcome
from anygauge.launch import local_job

SIZES = {"1 KiB": 2**10, "1 MiB": 2**20, "64 MiB": 2**26}
"""Of float32 in a tensor."""
REPEATS = 5


def round_trip(backend: str, ranks: int, timeout_s: float = 180.0) -> Check:
    """Start ranks on this machine that sum tensors of several sizes, and time them.

    Args:
        timeout_s: seconds for the whole check.
    """
    name = "collective round trip"
    remedy = f"anygauge env --backend {backend} --devices {ranks} shows the ranks' variables"
    try:
        result = local_job.run("anygauge.launch.round_trip", backend, ranks, timeout_s)
    except local_job.LocalJobError as error:
        return Check(name, Outcome.FAIL, str(error), remedy)
    shown = []
    for size, taken in result["seconds"].items():
        # What leaves a rank, as a ring of n ranks sends it: 2 (n-1)/n of the tensor.
        rate = 2 * (ranks - 1) / ranks * SIZES[size] / taken / 2**20
        shown.append(f"{size} in {taken * 1e3:.2f} ms ({rate:,.0f} MiB/s)")
    seen = f"{ranks} ranks, {result['library']}: " + ", ".join(shown)
    wrong = result["wrong"]
    if wrong:
        seen += f"; sums of {wrong[0]} are wrong"
    return Check.of(name, not wrong, seen, remedy)


def run_rank(backend: Backend, rank: int, world_size: int) -> dict[str, Any]:
    """One rank of `round_trip`: size -> median ``seconds``, and sizes with ``wrong`` sums."""
    import torch

    device, collectives = backend.placement.device, backend.collectives
    wanted = float(sum(range(1, world_size + 1)))
    seconds, wrong = {}, []
    for name, size in SIZES.items():
        taken = []
        for _ in range(REPEATS):
            tensor = torch.full((size // 4,), float(rank + 1), device=device)
            taken.append(local_job.seconds(backend, partial(collectives.all_reduce, tensor)))
            if not bool((tensor == wanted).all()):
                wrong.append(name)
        seconds[name] = statistics.median(taken)
    found = {name for each in collectives.gather_objects(wrong) for name in each}
    return {
        "library": collectives.backend_name(device),
        "seconds": seconds,
        "wrong": [name for name in SIZES if name in found],
    }


if __name__ == "__main__":
    sys.exit(local_job.main(run_rank, sys.argv[1:]))
