"""Measures what this machine's cards reach: ``anygauge plan --calibrate``.

Real ranks, one on each card, in the environment of a run's ranks, all at the same time. Each figure
is a median: large matrix products, an addition, collectives, and the host's time for an operation.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.agent import local_job
from anygauge.config.schema import AUTO_ORDER
from anygauge.interface import Backend, Job, Phase
from anygauge.models.quiet import quiet_libraries
from anygauge.planning.counting import Counter, Seen
from anygauge.registry import Registry

MODULE = "anygauge.planning.calibration"
TIMEOUT_S = 600.0
REPEATS = 7
LONG_S = 0.05
"""A measured call takes so long at least, as far as the sizes below allow."""
SIDES = (256, 512, 1024, 2048, 4096, 8192)
"""Of square matrices."""
BYTES = (2**22, 2**24, 2**26, 2**28)
"""Of a tensor that is copied, and of what a rank gives to a gather."""
LAYERS, WIDTH, TOKENS = 4, 64, 16
"""Of a model so small that its steps are all host."""


def measure(backend: str, options: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """What each of so many ranks reaches, as `anygauge.interface.Card` names it.

    Raises:
        LocalJobError: the ranks failed.
    """
    return local_job.run(MODULE, "calibration", backend, options, ranks, TIMEOUT_S)


def run_rank(job: Job, rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """Measure; returns the figures of rank 0: bytes per second, operations per second, seconds."""
    quiet_libraries()
    registry = Registry.load()
    with registry.create_backend(job.backend, job.backend_options) as backend:
        device = backend.open(local_rank)
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout_s=job.launch.collective_timeout_s,
            device=device,
            secret=job.token,
        )
        timed = _Timed(backend, world_size)
        found: dict[str, Any] = {
            "matmul": {kind: _matmul(timed, kind) for kind in _types(backend)},
            "copy": _copy(timed),
            "issue": _issue(timed),
        }
        if world_size > 1:
            found |= {"exchange": _exchange(timed, world_size), "call": _call(timed)}
        return found


def _types(backend: Backend) -> list[str]:
    """What runs may compute in; float32 is not a capability, since all do."""
    return [kind for kind in AUTO_ORDER if kind == "float32" or backend.support(kind)]


class _Timed:
    """Times what all ranks do at once."""

    def __init__(self, backend: Backend, world_size: int) -> None:
        self.backend = backend
        self.device = backend.placement.device
        self._together = world_size > 1

    def __call__(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Seconds of one call, the median of several; the first is not counted."""
        seconds = [self._once(work) for _ in range(repeats + 1)]
        return statistics.median(seconds[1:])

    def of_long_enough(
        self, sizes: tuple[int, ...], work: Callable[[int], Callable[[], object]]
    ) -> tuple[int, float]:
        """The first of the sizes that takes long enough, or else the last, and its seconds."""
        for size in sizes:
            call = work(size)
            seconds = [self(call, 1)]
            if self._together:  # all ranks must agree which size is the last
                seconds = self.backend.collectives.gather_objects(seconds[0])
            if max(seconds) >= LONG_S or size == sizes[-1]:
                return size, self(call)
        raise AssertionError("there are no sizes")

    def _once(self, work: Callable[[], object]) -> float:
        placement = self.backend.placement
        placement.synchronize()
        if self._together:
            self.backend.collectives.barrier()
        began = time.perf_counter()
        work()
        self.backend.graph.mark_step(Phase.UPDATE)
        placement.synchronize()
        return time.perf_counter() - began


def _matmul(timed: _Timed, kind: str) -> float:
    """Operations per second of a product of square matrices."""
    dtype = getattr(torch, kind)

    def product(side: int) -> Callable[[], object]:
        one = torch.randn(side, side, device=timed.device).to(dtype)
        return lambda: one @ one

    side, seconds = timed.of_long_enough(SIDES, product)
    return float(2 * side**3 / seconds)


def _copy(timed: _Timed) -> float:
    """Bytes per second that an addition reads and writes."""

    def addition(size: int) -> Callable[[], object]:
        one, two = (torch.ones(size // 4, device=timed.device) for _ in range(2))
        result = torch.empty_like(one)
        return lambda: torch.add(one, two, out=result)

    size, seconds = timed.of_long_enough(BYTES, addition)
    return 3 * size / seconds


def _exchange(timed: _Timed, world_size: int) -> float:
    """Bytes per second that leave each rank where all gather."""

    def gather(size: int) -> Callable[[], object]:
        one = torch.ones(size // 4, device=timed.device)
        return lambda: timed.backend.collectives.all_gather(one)

    size, seconds = timed.of_long_enough(BYTES, gather)
    return (world_size - 1) * size / seconds


def _call(timed: _Timed) -> float:
    """Seconds of a sum of one number."""
    one = torch.zeros(1, device=timed.device)
    return timed(lambda: timed.backend.collectives.all_reduce(one), 10 * REPEATS)


def _issue(timed: _Timed) -> float:
    """Seconds that a host takes for an operation of a step, with the layers of Python around it."""
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": 2 * WIDTH,
        "max_position_embeddings": 2 * TOKENS,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(timed.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=timed.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    counter = Counter(timed.device.type)
    with Seen(counter):
        step()
    return timed(step, 3 * REPEATS) / counter.taken().operations


if __name__ == "__main__":
    sys.exit(local_job.main(MODULE, run_rank, sys.argv[1:]))
