"""Checks on several ranks: every collective of the contract against what it must give."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anygauge.interface import HOST_DEVICE, Backend
from anygauge.testing.check import NotAsked, check

SIZES = (1, 7, 1000)
"""Elements: one, a number that no number of ranks divides, and more."""
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
IDENTITY = ("RANK", "LOCAL_RANK")
"""Variables by which ranks differ in any case."""
LATE_S = 0.5
"""How much later one rank comes to a barrier than the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """One of several ranks, each with its device."""

    backend: Backend
    device: torch.device
    rank: int
    world_size: int

    @property
    def collectives(self) -> Any:
        """The backend's."""
        return self.backend.collectives

    def dtypes(self) -> list[torch.dtype]:
        """Types that a reduction must serve here."""
        found = [torch.float32]
        if self.backend.support("bfloat16"):
            found.append(torch.bfloat16)
        if self.backend.support("float16"):
            found.append(torch.float16)
        return found

    def cases(self) -> Iterator[tuple[torch.dtype, int, list[torch.Tensor]]]:
        """(type, size, every rank's float64 values), the same on all ranks; sums stay exact."""
        for dtype in self.dtypes():
            for size in SIZES:
                yield (
                    dtype,
                    size,
                    [
                        ((torch.arange(size) * (rank + 3)) % 8 + rank).double()
                        for rank in range(self.world_size)
                    ],
                )

    def mine(self, values: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's values, on its device."""
        return values[self.rank].to(device=self.device, dtype=dtype)

    def same(self, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Fail unless `found` is on the device and close to the float64 values `wanted`."""
        assert found.device.type == self.device.type, f"{what}: the result is on {found.device}"
        got = found.to(HOST_DEVICE, torch.float64)
        assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}"
        error = float((got - wanted).abs().max())
        allowed = TOLERANCE[found.dtype] * max(1.0, float(wanted.abs().max()))
        assert error <= allowed, (
            f"{what} of {wanted.numel()} x {found.dtype}: wanted {wanted[:4].tolist()}..., got "
            f"{got[:4].tolist()}..."
        )


def _reduced(on: Together, op: str) -> None:
    for dtype, _, values in on.cases():
        stacked = torch.stack(values)
        wanted = {"sum": stacked.sum(0), "mean": stacked.mean(0), "max": stacked.amax(0)}[op]
        tensor = on.mine(values, dtype)
        result = on.collectives.all_reduce(tensor, op=op)
        on.backend.placement.synchronize()
        on.same(result, wanted, f"all_reduce {op}")
        on.same(tensor, wanted, f"all_reduce {op}, in place")


@check("all_reduce sums", part="ranks", capability="collectives")
def all_reduce_sums(on: Together) -> None:
    _reduced(on, "sum")


@check("all_reduce takes the mean", part="ranks", capability="collectives")
def all_reduce_means(on: Together) -> None:
    _reduced(on, "mean")


@check("all_reduce takes the maximum", part="ranks", capability="collectives")
def all_reduce_maximum(on: Together) -> None:
    _reduced(on, "max")


@check("all_reduce refuses an operation that is none", part="ranks", capability="collectives")
def all_reduce_unknown(on: Together) -> None:
    try:
        on.collectives.all_reduce(torch.ones(1, device=on.device), op="median")
    except ValueError as error:
        assert "median" in str(error)
    else:
        raise AssertionError("op='median' was taken without a word")


@check(
    "broadcast gives everyone the source's values, from each rank",
    part="ranks",
    capability="collectives",
)
def broadcasts(on: Together) -> None:
    for dtype, _, values in on.cases():
        for source in range(on.world_size):
            tensor = on.mine(values, dtype)
            on.same(on.collectives.broadcast(tensor, source=source), values[source], "broadcast")
            on.same(tensor, values[source], "broadcast, in place")


@check(
    "all_gather gives everyone's tensor in the order of ranks",
    part="ranks",
    capability="collectives",
)
def all_gathers(on: Together) -> None:
    for dtype, _, values in on.cases():
        parts = on.collectives.all_gather(on.mine(values, dtype))
        assert len(parts) == on.world_size, f"{len(parts)} parts of {on.world_size} ranks"
        for part, wanted in zip(parts, values, strict=True):
            on.same(part, wanted, "all_gather")


@check("integers are summed and gathered exactly", part="ranks", capability="collectives")
def integers(on: Together) -> None:
    tensor = torch.tensor([on.rank, 10 * on.rank, 2**40], device=on.device)
    ranks = sum(range(on.world_size))
    parts = on.collectives.all_gather(tensor)
    for rank, part in enumerate(parts):
        assert part.to(HOST_DEVICE).tolist() == [rank, 10 * rank, 2**40], f"of rank {rank}: {part}"
    total = on.collectives.all_reduce(tensor)
    assert total.to(HOST_DEVICE).tolist() == [ranks, 10 * ranks, on.world_size * 2**40]


@check("nobody leaves a barrier before everyone has come", part="ranks", capability="collectives")
def barrier_waits(on: Together) -> None:
    on.collectives.barrier()
    for late in range(on.world_size):
        if on.rank == late:
            time.sleep(LATE_S)
        # One clock for all processes of a machine.
        came = time.monotonic()
        on.collectives.barrier()
        left = time.monotonic()
        times = on.collectives.gather_objects((came, left))
        for rank, (_, its_end) in enumerate(times):
            assert its_end >= times[late][0], (
                f"rank {rank} left {times[late][0] - its_end:.2f} s before rank {late} came"
            )


@check("numbers are summed on the host, in float64", part="ranks", capability="collectives")
def sums_on_host(on: Together) -> None:
    # Float32 would lose the ones.
    values = [2.0**40 if on.rank == 0 else 1.0, float(on.rank)]
    found = on.collectives.sum_on_host(values)
    assert found == [2.0**40 + on.world_size - 1, sum(range(on.world_size))], f"gave {found}"


@check("objects are gathered in the order of ranks", part="ranks", capability="collectives")
def gathers_objects(on: Together) -> None:
    found = on.collectives.gather_objects({"rank": on.rank, "text": "é" * on.rank})
    assert found == [{"rank": rank, "text": "é" * rank} for rank in range(on.world_size)]


@check(
    "the control group is of all ranks and works on the host",
    part="ranks",
    capability="collectives",
)
def control_group(on: Together) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=on.collectives.control_group)
    assert tensor.tolist() == [on.world_size] * 3


def _asked_by_engines(on: Together) -> None:
    for engine, reason in on.backend.unsupported_engines.items():
        raise NotAsked(f"it cannot run {engine}: {reason}")


@check(
    "what engines that shard ask of the library: gather and reduce-scatter of one buffer",
    part="ranks",
    capability="collectives",
)
def buffers(on: Together) -> None:
    _asked_by_engines(on)
    for dtype in on.dtypes():
        mine = torch.full((5,), float(on.rank + 1), dtype=dtype, device=on.device)
        whole = torch.empty(5 * on.world_size, dtype=dtype, device=on.device)
        dist.all_gather_into_tensor(whole, mine)
        wanted = torch.arange(1, on.world_size + 1).double().repeat_interleave(5)
        on.same(whole, wanted, "all_gather_into_tensor")
        part = torch.empty(5, dtype=dtype, device=on.device)
        dist.reduce_scatter_tensor(part, whole)
        on.same(
            part,
            torch.full((5,), float((on.rank + 1) * on.world_size)).double(),
            "reduce_scatter_tensor",
        )


@check(
    "an asynchronous collective has its result once it was waited for",
    part="ranks",
    capability="collectives",
)
def asynchronous(on: Together) -> None:
    _asked_by_engines(on)
    tensors = [torch.full((100,), float(on.rank + n), device=on.device) for n in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for n, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        wanted = sum(rank + n for rank in range(on.world_size))
        on.same(tensor, torch.full((100,), float(wanted)).double(), "asynchronous all_reduce")


@check("each rank has a device of its own", part="ranks", capability="collectives")
def devices_differ(on: Together) -> None:
    # Where each process sees one device alone, of number 0, its environment says which.
    seen = sorted((name, value) for name, value in os.environ.items() if name not in IDENTITY)
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()
    devices = on.collectives.gather_objects((on.device.index, digest))
    if all(index is not None for index, _ in devices):
        numbers = ", ".join(str(index) for index, _ in devices)
        assert len(set(map(tuple, devices))) == on.world_size, (
            f"ranks share: they have opened number {numbers}, in one environment"
        )


@check(
    "every rank had the backend's environment, closed its device and ended with status 0",
    part="ranks",
    of_the_end=True,
)
def ends_on_ranks(trouble: str) -> None:
    # One that is missing would hide behind the answers of the others.
    assert not trouble, trouble
