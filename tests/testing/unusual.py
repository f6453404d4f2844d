"""Devices that are unusual and sound: no check of the kit may fail on them. Then odd ones.

Each is a line of the table, as the wrong ones of `tests.testing.wrong` are.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

from anygauge.interface import (
    FULL,
    Finding,
    LaunchProfile,
    Level,
    NotAvailableError,
    Options,
    RunFileError,
    Setting,
    Support,
)
from tests.testing.table import Change, broken, capability, fail, then
from tests.testing.wrong import ANY, ODD, SOUND, Mutant, Wrong, replaced

ALONE = "a single device"
GRAIN = 2**21


def sound(
    name: str, *, base: str = "sim"
) -> Callable[[Callable[[Wrong], None]], Callable[[Wrong], None]]:
    """Decorator: a line of the table."""

    def register(change: Callable[[Wrong], None]) -> Callable[[Wrong], None]:
        SOUND[name] = Mutant(name, "", "", base, change)
        return change

    return register


def _leaves(*given: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


@sound("errors are raised late, at the next synchronisation")
def _(on: Wrong) -> None:
    late: list[Exception] = []

    def raise_now() -> None:
        if late:
            error = late[0]
            late.clear()
            raise error

    @on.operation(ANY)
    def operation(usual: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        name = usual.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal"):
            raise_now()
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if name == "_to_copy" and to_host and not kwargs.get("non_blocking"):
            raise_now()
        try:
            return usual(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if name != "empty":
                raise
            late.append(error)
            one = usual([1], *args[1:], **kwargs)
            return one.expand(args[0])
        except IndexError as error:
            late.append(error)
            return torch.zeros_like(_leaves(args)[0])

    @on.method("placement.synchronize")
    def synchronize(self: Any, usual: Any) -> None:
        usual()
        raise_now()


@sound("sums differ in their last bits from run to run, as it says")
def _(on: Wrong) -> None:
    on.backend.sums_vary = "threads add in the order in which they finish"

    @on.operation("mm", "bmm")
    def product(usual: Any, left: Any, right: Any, **kwargs: Any) -> Any:
        start = begin(left.shape[-1])
        return usual(left.roll(start, -1), right.roll(start, -2), **kwargs)

    @on.operation("sum", "mean")
    def sums(usual: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        for dim in range(values.dim()):
            values = values.roll(begin(values.shape[dim]), dim) if _all(args) else values
        return usual(values, *args, **kwargs)

    @on.operation("index_add", "index_add_")
    def add(usual: Any, into: Any, dim: int, index: Any, rows: Any, **kwargs: Any) -> Any:
        start = begin(index.numel())
        if index.dim() == 0 or rows.dim() == 0:
            return usual(into, dim, index, rows, **kwargs)
        return usual(into, dim, index.roll(start, 0), rows.roll(start, dim), **kwargs)


def begin(count: int) -> int:
    """Where a sum of so many begins this time; drawn by no generator of torch."""
    return random.SystemRandom().randrange(max(1, count))


def _all(args: tuple[Any, ...]) -> bool:
    """Whether a sum is over all dimensions, so that it does not matter which came first."""
    return not args or not args[0]


class HalfOptions(Options):
    """An option that switches a type on."""

    float16: bool = False


@sound("factors of float32 products keep 11 bits, as it says")
def _(on: Wrong) -> None:
    on.placement.float32_product_bits = 11

    def short(x: Any) -> Any:
        head = x * (2.0**13 + 1)
        return head - (head - x) if x.element_size() == 4 else x

    @on.operation("mm", "bmm")
    def product(usual: Any, left: Any, right: Any, **kwargs: Any) -> Any:
        return usual(short(left), short(right), **kwargs)

    @on.operation("addmm", "baddbmm")
    def added(usual: Any, to: Any, left: Any, right: Any, **kwargs: Any) -> Any:
        return usual(to, short(left), short(right), **kwargs)


@sound("float16 is switched off by an option")
def _(on: Wrong) -> None:
    on.spec(options=f"{__name__}:HalfOptions")

    @on.made
    def made(backend: Any) -> None:
        value = backend.options.float16
        off = Support(Level.SWITCHED_OFF, "set backend_options.float16: true to have it")
        backend.capabilities = {**on.backend.capabilities, "float16": FULL if value else off}


@sound("no type but float32")
def _(on: Wrong) -> None:
    only = Support(Level.UNSUPPORTED_BY_HARDWARE, "its units multiply float32 alone")
    lower: Mapping[str, Support] = dict.fromkeys(("bfloat16", "float16"), only)
    on.backend.capabilities = {**on.backend.capabilities, **lower}

    @on.operation(ANY)
    def operation(usual: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        found = {each.dtype for each in _leaves(args, kwargs)} | {kwargs.get("dtype")}
        if found & {torch.bfloat16, torch.float16}:
            raise RuntimeError("this device has float32 alone")
        return usual(*args, **kwargs)

    @on.method("placement.autocast")
    def autocast(self: Any, usual: Any, dtype: Any) -> Any:
        import torch

        from anygauge.interface import UnsupportedError

        if dtype is not torch.float32:
            raise UnsupportedError(f"autocast to {dtype}: its units multiply float32 alone")
        return usual(dtype)


def _pages(usual: Any) -> Any:
    found = usual()
    names = ("in_use", "peak", "limit")
    pages = {name: -(-getattr(found, name) // GRAIN) * GRAIN for name in names}
    return dataclasses.replace(found, **pages, reserved=pages["peak"] + 8 * GRAIN)


def _opens_one(usual: Any, local_rank: int) -> Any:
    if local_rank > 0:
        raise NotAvailableError(f"local rank {local_rank} has no device: there is 1")
    return usual(local_rank)


# Name, the sound backend that it is otherwise, and what is unusual, by target (see `replaced`).
UNUSUAL: tuple[tuple[str, str, Mapping[str, Change]], ...] = (
    ("memory is oversubscribed: what has no room moves to the host", "sim",
     {"placement.memory": lambda u: dataclasses.replace(u(), limit=None)}),
    ("processors whose memory has no limit that anyone knows", "cpu",
     {"placement.memory": lambda u: dataclasses.replace(u(), limit=None, reserved=None)}),
    ("memory is taken in pages of 2 MiB, and kept for later", "sim", {"placement.memory": _pages}),
    ("the probe cannot count", "sim",
     {"probe": lambda u: dataclasses.replace(u(), device_count=None, cards=())}),
    (ALONE, "sim",
     {"class backend.launch": lambda u: LaunchProfile(),  # there is none to hide
      "probe": lambda u: dataclasses.replace(u(), device_count=1),
      "placement.device_count": lambda u: 1, "placement.open": _opens_one}),
)  # fmt: skip


# -- odd ones, which tests of the kit start one by one ---------------------------------------------

MISSING = capability("collectives", Level.NOT_WRITTEN_YET, "so it says")
ODDITIES: tuple[tuple[str, Mapping[str, Change]], ...] = (
    ("sets a variable", {"settings": lambda job, node, rank: then(
        os.environ.update(ODD_WAS_HERE="1"),
        [Setting(name="ODD_RANKS", value=str(job.launch.devices), reason="told", source="here")])}),
    ("refuses the environment", {"backend.check_environment":
     lambda u, environ: fail(RunFileError, "two variables contradict each other")}),
    ("ends while it is asked", {"backend.check_environment": lambda u, environ: os._exit(9)}),
    ("no device", {"probe": lambda u: dataclasses.replace(
        u(), devices=Finding.no("no card"), device_count=0)}),
    ("no collectives", {"collectives.open": lambda u, **given: broken(u),
     "class backend.capabilities": MISSING}),
    ("collectives declared missing", {"class backend.capabilities": MISSING}),
)  # fmt: skip


def _odd(changes: Mapping[str, Change], on: Wrong) -> None:
    for target, change in changes.items():
        replaced(target, change)(on)


for _name, _base, _changes in UNUSUAL:
    sound(_name, base=_base)(functools.partial(_odd, _changes))
for _name, _changes in ODDITIES:
    ODD[_name] = Mutant(_name, "", "", "cpu", functools.partial(_odd, _changes))
