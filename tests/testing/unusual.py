"""Devices that are unusual and sound: no check of the kit may fail on them. Then odd ones.

Each is a line of the table, as the wrong ones of `tests.testing.wrong` are, of the part ``sound``
or ``odd``.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Mapping, Sequence
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
    UnsupportedError,
)
from tests.testing.table import broken, capability, fail, then
from tests.testing.wrong import ANY, Changes, mutant, tensors_of, torch

ALONE = "a single device"
GRAIN = 2**21


# -- errors that are raised late, at the next synchronization -------------------------------------

_late: list[Exception] = []


def _raise_now() -> Any:
    if _late:
        error = _late[0]
        _late.clear()
        raise error


def _late_errors(usual: Any, *args: Any, **kwargs: Any) -> Any:
    name = usual.overloadpacket.__name__
    if name in ("_local_scalar_dense", "equal"):
        _raise_now()
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if name == "_to_copy" and to_host and not kwargs.get("non_blocking"):
        _raise_now()
    try:
        return usual(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        if name != "empty":
            raise
        _late.append(error)
        one = usual([1], *args[1:], **kwargs)
        return one.expand(args[0])
    except IndexError as error:
        _late.append(error)
        return torch.zeros_like(tensors_of(args)[0])


# -- sums that vary, products of fewer bits, and no type but float32 ------------------------------


def begin(count: int) -> int:
    """Where a sum of so many begins this time; drawn by no generator of torch."""
    return random.SystemRandom().randrange(max(1, count))


def _varying_product(usual: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    start = begin(left.shape[-1])
    return usual(left.roll(start, -1), right.roll(start, -2), **kwargs)


def _varying_sum(usual: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    # Over all dimensions, so that it does not matter which came first.
    for dim in range(values.dim()) if not args or not args[0] else ():
        values = values.roll(begin(values.shape[dim]), dim)
    return usual(values, *args, **kwargs)


def _varying_add(usual: Any, into: Any, dim: int, index: Any, rows: Any, **kwargs: Any) -> Any:
    if index.dim() == 0 or rows.dim() == 0:
        return usual(into, dim, index, rows, **kwargs)
    start = begin(index.numel())
    return usual(into, dim, index.roll(start, 0), rows.roll(start, dim), **kwargs)


def short(x: Any) -> Any:
    """The first 11 bits of float32 values."""
    head = x * (2.0**13 + 1)
    return head - (head - x) if x.element_size() == 4 else x


class HalfOptions(Options):
    """An option that switches a type on."""

    float16: bool = False


def _half(backend: Any) -> None:
    off = Support(Level.SWITCHED_OFF, "set backend_options.float16: true to have it")
    found = FULL if backend.options.float16 else off
    backend.capabilities = {**type(backend).capabilities, "float16": found}


ONLY = Support(Level.UNSUPPORTED_BY_HARDWARE, "its units multiply float32 alone")


def _only_float32(usual: Any, *args: Any, **kwargs: Any) -> Any:
    found = {each.dtype for each in tensors_of(args, kwargs)} | {kwargs.get("dtype")}
    if found & {torch.bfloat16, torch.float16}:
        raise RuntimeError("this device has float32 alone")
    return usual(*args, **kwargs)


def _cast(usual: Any, dtype: Any) -> Any:
    if dtype is not torch.float32:
        raise UnsupportedError(f"autocast to {dtype}: its units multiply float32 alone")
    return usual(dtype)


# -- memory, and a single device ------------------------------------------------------------------


def _pages(usual: Any) -> Any:
    found = usual()
    names = ("in_use", "peak", "limit")
    pages = {name: -(-getattr(found, name) // GRAIN) * GRAIN for name in names}
    return dataclasses.replace(found, **pages, reserved=pages["peak"] + 8 * GRAIN)


def _opens_one(usual: Any, local_rank: int) -> Any:
    if local_rank > 0:
        raise NotAvailableError(f"local rank {local_rank} has no device: there is 1")
    return usual(local_rank)


# Name, the sound backend that it is otherwise, and what is unusual, by target.
UNUSUAL: Sequence[tuple[str, str, Changes]] = (
    ("errors are raised late, at the next synchronization", "sim",
     {f"op {ANY}": _late_errors, "placement.synchronize": lambda u: then(u(), _raise_now())}),
    ("sums differ in their last bits from run to run, as it says", "sim",
     {"class backend.sums_vary": lambda u: "threads add in the order in which they finish",
      "op mm bmm": _varying_product, "op sum mean": _varying_sum,
      "op index_add index_add_": _varying_add}),
    ("factors of float32 products keep 11 bits, as it says", "sim",
     {"class placement.float32_product_bits": lambda u: 11,
      "op mm bmm": lambda u, a, b, **k: u(short(a), short(b), **k),
      "op addmm baddbmm": lambda u, to, a, b, **k: u(to, short(a), short(b), **k)}),
    ("float16 is switched off by an option", "sim",
     {"spec.options": lambda: f"{__name__}:HalfOptions", "at make": _half}),
    ("no type but float32", "sim",
     {"class backend.capabilities": lambda u: {**u, "bfloat16": ONLY, "float16": ONLY},
      f"op {ANY}": _only_float32, "placement.autocast": _cast}),
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
ODDITIES: Mapping[str, Changes] = {
    "sets a variable": {"settings": lambda job, node, rank: then(
        os.environ.update(ODD_WAS_HERE="1"),
        [Setting(name="ODD_RANKS", value=str(job.launch.devices), reason="told", source="here")])},
    "refuses the environment": {"backend.check_environment":
     lambda u, environ: fail(RunFileError, "two variables contradict each other")},
    "ends while it is asked": {"backend.check_environment": lambda u, environ: os._exit(9)},
    "no device": {"probe": lambda u: dataclasses.replace(
        u(), devices=Finding.no("no card"), device_count=0)},
    "no collectives": {"collectives.open": lambda u, **given: broken(u),
     "class backend.capabilities": MISSING},
    "collectives declared missing": {"class backend.capabilities": MISSING},
}  # fmt: skip


for _name, _base, _changes in UNUSUAL:
    mutant(_name, "sound", "", _changes, base=_base)
for _name, _changes in ODDITIES.items():
    mutant(_name, "odd", "", _changes)
