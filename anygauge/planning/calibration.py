"""Measures what this machine's cards reach: ``anygauge plan --calibrate``.

Real ranks, one on each card, in the environment of a run's ranks, all at the same time. Each figure
is a median. If the ranks' device is the host, they also take real steps of small models. A
processor's rates depend on what it is given: on the size of products, on what lies in its caches,
on threads. So its figures are those that best explain these steps, not those of large matrices.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.agent import local_job
from anygauge.config.resolved import parse_run
from anygauge.config.schema import AUTO_ORDER, RunFile, resolve_precision
from anygauge.interface import HOST_DEVICE, Backend, Job, Phase
from anygauge.interface.strategy import BuildContext
from anygauge.kernels.choose import kernels_of_run
from anygauge.kernels.loss import model_loss
from anygauge.kernels.plan import plan_kernels
from anygauge.models.factory import CausalModelFactory
from anygauge.models.quiet import quiet_libraries
from anygauge.planning.counting import Counter, Seen
from anygauge.planning.run import factory_of, rows_of
from anygauge.planning.work import Work
from anygauge.registry import Registry
from anygauge.training.optimizer import FUSED_ADAMW, optimizer_factory
from anygauge.training.strategy import create_strategy, workload_of

MODULE = "anygauge.planning.calibration"
TIMEOUT_S = 600.0
REPEATS = 7
LONG_S = 0.05
"""A measured call takes so long at least, as far as the sizes below allow."""
SIDES = (256, 512, 1024, 2048, 4096, 8192)
"""Of square matrices."""
BYTES = (2**22, 2**24, 2**26, 2**28)
"""Of a tensor that is copied, and of what a rank gives to a gather."""
SLOW = 0.1
"""Of float32's products: no steps are made in a type that is slower, which would take minutes."""
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
        if device.type != HOST_DEVICE:
            return found
        usual = SLOW * found["matmul"]["float32"]
        kinds = [kind for kind, rate in found["matmul"].items() if rate >= usual]
        runs = practice(registry, kinds, world_size)
        return explained(
            [practised(run, registry, backend, rank, world_size) for run in runs], found
        )


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


STEPS = 7
"""Of each model, whose median counts; two before them are not timed."""
LORA: Mapping[str, Any] = {"adapter": {"r": 8}}
ALL: Mapping[str, Any] = {"adapter": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of a model, and of what it is given in a step."""

    width: int
    layers: int
    length: int
    rows: int = 1
    words: int = 2048


TINY = Shape(width=64, layers=4, length=16, words=128)
SHAPES = (
    Shape(width=256, layers=4, length=256, rows=2),
    Shape(width=512, layers=4, length=128, rows=2),
    Shape(width=768, layers=2, length=256),
    Shape(width=384, layers=2, length=512),
    Shape(width=256, layers=2, length=1536),
    Shape(width=384, layers=1, length=256, words=16_384),
)
"""None is a benchmark's; together they have what models have in other parts."""


def practice(registry: Registry, kinds: list[str], ranks: int) -> Iterator[RunFile]:
    """Runs for so many ranks: each strategy that `auto` takes because there are several.

    Args:
        kinds: types to compute in; the last alone with strategies other than the fastest.
    """
    fastest, *others = _strategies(registry, ranks)
    for kind in kinds:
        for shape in (TINY, *SHAPES):
            for trained in (LORA, ALL):
                yield _run(shape, kind, ranks, fastest, trained)
    for shape in (TINY, *SHAPES[:3]):
        for trained in (LORA, ALL):
            for other in others:
                yield _run(shape, kinds[-1], ranks, other, trained)


def _strategies(registry: Registry, ranks: int) -> list[Mapping[str, Any]]:
    """Sections of run files, the fastest first."""
    forms = [(form, one.spec.name) for one in registry.strategies for form in one.spec.auto]
    forms.sort(key=lambda one: (one[0].place, one[1]))
    alone = ranks == 1
    found: list[Mapping[str, Any]] = [
        {**form.options, "name": name} for form, name in forms if form.alone == alone
    ]
    return found[:1] if alone else found


def _run(
    shape: Shape, kind: str, ranks: int, strategy: Mapping[str, Any], trained: Mapping[str, Any]
) -> RunFile:
    config = {
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": 3 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.width // 64 or 1,
        "vocab_size": shape.words,
        "max_position_embeddings": 2048,
    }
    return parse_run(
        json.dumps(
            {
                "model": {"config": config, "tokenizer": "none"},
                "data": {"train": {"path": "none.jsonl"}, "max_length": shape.length},
                "strategy": strategy,
                "precision": {"param_dtype": kind},
                "train": {
                    "steps": STEPS,
                    "micro_batch_size": shape.rows,
                    "global_batch_size": shape.rows * ranks,
                    "gradient_checkpointing": False,
                },
                "launch": {"devices": ranks},
                **trained,
            }
        )
    )


def practised(
    run: RunFile, registry: Registry, backend: Backend, rank: int, world_size: int
) -> tuple[Work, float]:
    """What a step of a run is of work, and how many seconds it takes.

    Args:
        backend: open, with its collectives.
    """
    precision = resolve_precision(run.precision, backend.support)
    factory = factory_of(CausalModelFactory, run, precision)
    kernels = plan_kernels(run, backend, kernels_of_run(run, backend, registry), factory)
    workload = workload_of(run, registry, backend, precision, rank, world_size)
    engine = create_strategy(registry, run).build(
        BuildContext(
            factory=factory.having(kernels.attention.name, kernels.model),
            optimizer=optimizer_factory(
                run.train.optimizer, kernels.adamw, fused=bool(backend.support(FUSED_ADAMW))
            ),
            workload=workload,
            clip_grad_norm=kernels.clip_grad_norm,
        )
    )
    device = backend.placement.device
    rows = rows_of(run, workload, precision)

    def step() -> float:
        backend.collectives.barrier()
        began = time.perf_counter()
        engine.run_step([rows(device)], model_loss, 1)
        engine.update(1e-4, workload.max_norm)
        return time.perf_counter() - began

    step()
    step()
    counter = Counter(device.type)
    with Seen(counter):
        step()
    seconds = median(step() for _ in range(STEPS))
    engine.close()
    return counter.taken(), seconds


AT_BEST = 0.1
"""Of the cost that was measured directly, what is believed of a cost at least."""
FEED, COPY, ISSUE, CALL, EXCHANGE = "feed", "copy", "issue", "call", "exchange"


def explained(steps: Sequence[tuple[Work, float]], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Rates with which the planned seconds of steps miss the measured ones least.

    The sum of the squares of relative errors is least, while no rate is better than ten times what
    was measured directly.

    Args:
        steps: work, and the seconds it took.
        measured: directly, as `anygauge.interface.Card` names it: ``matmul``, ``copy``, ``issue``,
            and with several ranks ``exchange`` and ``call``.

    Returns:
        As `measured`, with ``feed`` and ``attention``.
    """
    products = [
        (name, kind)
        for name, of in _PRODUCTS.items()
        for kind in measured["matmul"]
        if any(getattr(work, of).get(kind) for work, _ in steps)
    ]
    costs: dict[Any, float] = {one: 1 / measured["matmul"][one[1]] for one in products}
    costs |= {FEED: 1 / measured[COPY], COPY: 1 / measured[COPY], ISSUE: measured[ISSUE]}
    if CALL in measured:
        costs |= {CALL: measured[CALL], EXCHANGE: 1 / measured[EXCHANGE]}
    best = torch.tensor([AT_BEST * cost for cost in costs.values()], dtype=torch.float64)
    shares = torch.tensor(
        [[figures[name] / took for name in costs] for figures, took in _figured(steps, products)],
        dtype=torch.float64,
    )
    found = best + _least_squares(shares, 1 - shares @ best)
    by_name = dict(zip(costs, found.tolist(), strict=True))
    rates: dict[str, Any] = {"matmul": dict(measured["matmul"]), "attention": {}}
    for name, kind in products:
        rates[name][kind] = 1 / by_name.pop((name, kind))
    return {**rates, **{k: v if k in (ISSUE, CALL) else 1 / v for k, v in by_name.items()}}


_PRODUCTS = {"matmul": "flops", "attention": "attention"}
"""Rates by type -> what they are of in `Work`."""


def _figured(
    steps: Sequence[tuple[Work, float]], products: Sequence[tuple[str, str]]
) -> list[tuple[dict[Any, float], float]]:
    """What each cost is multiplied with, and the seconds.

    Args:
        products: rates and types of what was multiplied.
    """
    found = []
    for work, took in steps:
        figures: dict[Any, float] = {
            (name, kind): getattr(work, _PRODUCTS[name]).get(kind, 0.0) for name, kind in products
        }
        figures |= {FEED: work.matrix_bytes, COPY: work.other_bytes, ISSUE: work.operations}
        figures[CALL] = sum(one.times for one in work.traffic)
        figures[EXCHANGE] = sum(one.wire for one in work.traffic)
        found.append((figures, took))
    return found


def _least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """The x >= 0, (columns,), for which matrix @ x is nearest to `right`; few columns."""
    columns = matrix.shape[1]
    best = torch.zeros(columns, dtype=matrix.dtype)
    least = float(right.square().sum())
    for count in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), count)):
            part = torch.linalg.lstsq(matrix[:, chosen], right, driver="gelsd").solution
            missed = float((matrix[:, chosen] @ part - right).square().sum())
            if (part >= 0).all() and missed < least:
                least = missed
                best = torch.zeros_like(best)
                best[chosen] = part
    return best


if __name__ == "__main__":
    sys.exit(local_job.main(MODULE, run_rank, sys.argv[1:]))
