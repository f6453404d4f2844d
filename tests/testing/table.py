# mypy: disable-error-code="func-returns-value,misc"
"""Wrong devices, a line each: what is wrong, the check that must fail, and what makes it so.

Those of torch's operators are beside this file.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import field_validator

from anygauge.interface import (
    Check,
    Finding,
    LaunchProfile,
    Level,
    NotAvailableError,
    Phase,
    Scope,
    Setting,
    ShapePolicy,
    Support,
)
from anygauge_cpu.backend import CpuOptions
from tests.testing.wrong import Change, Changes, lines, mutant, torch

FOR_EVER = 10**6
LARGE = 2**20
HELPER = [sys.executable, "-c", "import time; time.sleep(60)"]
kept: list[Any] = []
"""What a mutant remembers; each has a process of its own."""


def then(*done: Any) -> Any:
    """The last of what was done one after the other."""
    return done[-1]


def fail(kind: type[Exception], words: str) -> Any:
    raise kind(words)


def rank() -> int:
    return int(os.environ["RANK"])


def capability(name: str, of: Level, why: str) -> Change:
    return lambda usual: {**usual, name: Support(of, why)}


# -- on paper -------------------------------------------------------------------------------------


def figures_by_torch() -> Mapping[str, float]:
    return {"memory": float(torch.finfo(torch.float32).max)}


class AnyOption(CpuOptions, extra="allow"):
    """It takes options that it does not have."""


class LevelOptions(CpuOptions):
    """A wrong value of its option ends in a KeyError."""

    level: Any = "low"

    @field_validator("level")
    @classmethod
    def _read(cls, value: Any) -> int:
        return {"low": 1, "high": 2}[str(value)]


class Longer(ShapePolicy):
    def padded_length(self, length: int, maximum: int) -> int:
        return maximum + 1


def level(value: Any = "1", scope: Scope = Scope.JOB, **more: Any) -> list[Setting]:
    """One setting more."""
    fields = {"name": "MUTANT_LEVEL", "reason": "a reason", "source": "a page", "value": str(value)}
    return [Setting(**{**fields, "scope": scope, **more})]


lines("basic", (
    ("its name is in upper case", "announced", "spec.name", lambda: "MUTANT"),
    ("it was written for a later contract", "announced", "spec.api_version", lambda: 2),
    ("announcing it imports a library of tensors", "announced", "at import",
     lambda: sys.modules.update(jax=types.ModuleType("jax"))),  # heavy by its name
    ("figures come from torch", "probe_is_pure", "spec.this_machine", lambda: figures_by_torch),
    ("probe imports torch", "probe_is_pure", "probe", lambda u: then(torch.float32, u())),
    ("probe is slow", "probe_is_pure", "probe", lambda u: then(time.sleep(3), u())),
    ("probe sets a variable", "probe_is_pure", "probe",
     lambda u: then(os.environ.update(WAS_HERE="1"), u())),
    ("probe varies", "probe_is_pure", "probe",
     lambda u: replace(u(), notes=(str(random.random()),))),
    ("finding without words", "probe_is_pure", "probe",
     lambda u: replace(u(), software=Finding.yes(""))),
    ("available with 0 devices", "probe_is_pure", "probe", lambda u: replace(u(), device_count=0)),
    ("one name stands for four cards", "probe_is_pure", "probe",
     lambda u: replace(u(), cards=("card",) * 4)),
    ("opens when it is made", "light_construction", "at make", lambda b: b.placement.open(0)),
    ("instances share a placement", "light_construction", "at make",
     lambda b: then(kept.append(b.placement), setattr(b, "placement", kept[0]))),
    ("a capability that nobody asks about", "described", "class backend.capabilities",
     capability("zero", Level.FULL, "")),
    ("a reason is a note to oneself", "described", "class backend.capabilities",
     capability("float16", Level.PARTIAL, "TODO")),
    ("switched off, who knows by what", "described", "class backend.capabilities",
     capability("float16", Level.SWITCHED_OFF, "not today")),
    ("a comma is missing after the only library", "described", "class backend.libraries",
     lambda u: "vendor-torch"),
    ("a closed device is none", "light_construction", "class placement.device", lambda u: None),
    ("a wrong value ends in a KeyError", "options_are_checked", "spec.options",
     lambda: f"{__name__}:LevelOptions"),
    ("takes any option", "options_are_checked", "spec.options", lambda: f"{__name__}:AnyOption"),
    ("padded beyond the maximum", "described", "class graph.shapes", lambda u: Longer()),
    ("a check of doctor has no words", "described", "backend.diagnostics",
     lambda u: [*u(), Check(name="driver", outcome="pass", seen="")]),
    # Settings: each gets the job, the node and the local rank.
    ("environment varies", "rules_read_the_node_alone", "settings",
     lambda *_: level(random.random())),
    ("environment sets variables itself", "rules_read_the_node_alone", "settings",
     lambda *_: then(os.environ.update(WAS="1"), [])),
    ("a value that is not a text", "settings_are_sound", "settings",
     lambda *_: [replace(level()[0], value=1)]),
    ("a setting without a reason", "settings_are_sound", "settings", lambda *_: level(reason="")),
    ("two rules for one variable", "settings_are_sound", "settings",
     lambda j, n, r: level(name="OMP_NUM_THREADS", scope=Scope.RANK) * (r is not None)),
    ("a rule numbers the ranks", "settings_are_sound", "settings",
     lambda j, n, r: level(r, Scope.RANK, name="RANK") * (r is not None)),
    ("a rank's value without a rank", "scopes_hold", "settings",
     lambda *_: level(scope=Scope.RANK)),
    ("the job's variable is set on one machine", "scopes_hold", "settings",
     lambda j, n, r: level() * (n.rank == 0)),
    ("the node's value is of two ranks", "scopes_hold", "settings",
     lambda j, n, r: level((r or 0) // 2, Scope.NODE)),
    ("a rule reads a variable of the process", "rules_read_the_node_alone", "settings",
     lambda *_: level(os.environ.get("DEBUG", 1))),
    ("a rule asks this machine for its name", "rules_read_the_node_alone", "settings",
     lambda *_: level(socket.gethostname())),
    ("a rule needs a version that is not known", "rules_hold_on_any_machine", "settings",
     lambda j, n, r: level(n.libraries["torch"])),
    ("aborts at its end", "ends_on_paper", "at make", lambda b: atexit.register(os.abort)),
))  # fmt: skip


# -- what is left behind, at each step of a backend's life -----------------------------------------


def sleeper(seconds: float = 20) -> None:
    threading.Thread(target=time.sleep, args=(seconds,)).start()


def orphan() -> None:
    """A helper whose parent has ended, as services are started."""
    code = f"import subprocess; subprocess.Popen({HELPER!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def libc() -> Any:
    return ctypes.CDLL(None)


def acts(target: str, act: Callable[[], Any]) -> Change:
    """Do what is usual, then `act`."""
    if target == "at import":
        return act
    return lambda usual, *args, **kwargs: (usual(*args, **kwargs), act())[0]


LEFT: Sequence[tuple[str, str, Mapping[str, Callable[[], Any]]]] = (
    ("basic", "at import", {
        "output": lambda: print("Vendor SDK 3.1"),
        "signals": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
        "variables": lambda: os.environ.update(OMP_NUM_THREADS="64", MUTANT="3"),
        "settings": lambda: warnings.filterwarnings("ignore"),
        "files": lambda: Path("vendor.log").write_text("opened\n"),
        "running": sleeper}),
    ("device", "placement.close", {
        "output": lambda: libc().printf(b"Vendor SDK 3.1\n"),
        "signals": lambda: libc().signal(int(signal.SIGPIPE), None),
        "variables": lambda: os.environ.pop("PYTHONPATH", None),
        "settings": lambda: os.chdir("/"),
        "files": lambda: Path("vendor.log").write_text("closed\n"),
        "running": lambda: subprocess.Popen(HELPER)}),
    ("ranks", "collectives.open", {
        "output": lambda: print("Vendor SDK 3.1"),
        "signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}),
        "variables": lambda: os.environ.update(OMP_NUM_THREADS="64"),
        "settings": lambda: torch.set_default_dtype(torch.bfloat16),
        "files": lambda: Path("vendor.log").write_text("opened\n"),
        "running": orphan}),
)  # fmt: skip
for _part, _step, _acts in LEFT:
    for _kind, _act in _acts.items():
        _line = (f"leaves {_kind} ({_step})", f"{_part}_leaves_{_kind}", _step, acts(_step, _act))
        lines(_part, [_line])


def unnormalized(x: Any, dim: int, *rest: Any, **named: Any) -> Any:
    """A softmax that forgets to divide."""
    return (x - x.amax(dim, keepdim=True)).exp()


def never(*_: Any, **__: Any) -> None:
    time.sleep(FOR_EVER)


def broken(_: Any) -> Any:
    raise RuntimeError("the driver is gone")


lines("device", (
    ("a kernel is wrong", "kernels_agree", "kernel softmax", unnormalized),
    ("close leaves it open", "closes", "placement.close", lambda u: None),
    ("close raises", "ends_on_device", "backend.close", lambda u: broken(u())),
))  # fmt: skip
lines("ranks", (
    ("leaving keeps the group", "leaves_no_group", "collectives.close", lambda u: None),
    ("every rank opens the same device", "devices_differ", "placement.open",
     lambda u, r: then(u(r), setattr(u.__self__, "_device", torch.device("cpu:0")),
                       u.__self__.device)),
    ("a rank's device does not close", "ends_on_ranks", "placement.close",
     lambda u: then(u(), rank() and broken(u))),
))  # fmt: skip
lines("device", (
    ("a new peak never begins", "memory_moves", "placement.reset_peak", never),
    ("the process never ends", "ends_on_device", "placement.close",
     acts("placement.close", lambda: sleeper(FOR_EVER))),
), limit_s=6)  # fmt: skip
lines("ranks", (
    ("rank 1 never comes to a barrier", "barrier_waits", "collectives.barrier",
     lambda u: then(rank() and never(), u())),
), limit_s=6)  # fmt: skip


# -- on a device ----------------------------------------------------------------------------------

SMALL = {"ANYGAUGE_SIM_CAPACITY": str(2**28)}


def refused(error: BaseException) -> int:
    """Bytes that a simulated card refused."""
    text = str(error).partition("out of memory: ")[2].partition(" ")[0]
    return int(text) if text.isdigit() else 0


def spoil() -> None:
    """Write over the first large piece that is held on a simulated card."""
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type == "sim" and each.numel() >= LARGE:
            each[: LARGE // 2].fill_(77)
            return


def _hoard(usual: Any, *args: Any, **kwargs: Any) -> Any:
    out = usual(*args, **kwargs)
    if 2**21 < out.numel() <= 2**22:
        kept.append(out)
    return out


def memory(change: Callable[[Any], dict[str, Any]]) -> Change:
    return lambda u: replace(u(), **change(u()))


lines("device", (
    ("what is freed still counts", "memory_moves", "placement.memory",
     memory(lambda m: {"in_use": m.peak})),
    ("peak is half of what came on top", "memory_moves", "placement.memory",
     memory(lambda m: {"peak": (m.peak + m.in_use) // 2})),
    ("memory is counted in mebibytes", "memory_moves", "placement.memory",
     memory(lambda m: {"in_use": m.in_use / 2**20})),
    ("the limit is what is free", "memory_moves", "placement.memory",
     memory(lambda m: {"limit": 2**40 - m.in_use})),
    ("opening settles nothing", "opens", "class backend.capabilities",
     capability("float16", Level.DEPENDS, "so it says")),
    ("float16 works but is declared missing", "float16_arithmetic", "class backend.capabilities",
     capability("float16", Level.UNSUPPORTED_BY_HARDWARE, "so")),
))  # fmt: skip
lines("device", (
    ("opening gives the host", "opens", "placement.open",
     lambda u, r: then(u(r), torch.device("cpu"))),
    ("a rank without a device learns no number", "opens", "placement.open",
     lambda u, r: fail(NotAvailableError, "none") if r > 100 else u(r)),
    ("the probe counts halves of devices", "devices_are_counted", "probe",
     lambda u: replace(u(), device_count=16)),
    ("the visibility variable has another name", "devices_are_counted", "class backend.launch",
     lambda u: LaunchProfile(visibility_variable="V")),
    ("peak cannot be reset", "memory_moves", "placement.reset_peak", lambda u: None),
    ("two neighbouring seeds are one", "every_generator_is_saved", "placement.seed",
     lambda u, seed: u(seed // 2)),
    ("the device is not seeded", "every_generator_is_saved", "placement.seed",
     lambda u, seed: torch.default_generator.manual_seed(seed)),
    ("autocast is ignored", "autocast_casts", "placement.autocast", lambda u, dtype: nullcontext()),
    ("autocast lowers float32, too", "autocast_casts", "placement.autocast",
     lambda u, dtype: u(torch.bfloat16)),
    ("integers become floats", "copies_keep_values", "placement.to_device",
     lambda u, b: u(b).float() if hasattr(b, "float") else u(b)),
    ("nested tensors stay behind", "copies_are_ordered", "placement.to_device",
     lambda u, b: {k: v if isinstance(v, Mapping) else u(v) for k, v in b.items()}),
    ("every error is out of memory", "out_of_memory", "placement.is_out_of_memory",
     lambda u, e: True),
    ("huge requests are unknown", "out_of_memory", "placement.is_out_of_memory",
     lambda u, e: u(e) and 0 < refused(e) < 2**50),
), base="sim")  # fmt: skip
lines("device", (
    ("the limit is half of what is given", "out_of_memory", "placement.memory",
     memory(lambda m: {"limit": m.limit // 2 + 2**20})),
    ("what is refused takes the place of what is held", "out_of_memory",
     "placement.is_out_of_memory", lambda u, e: then(spoil(), u(e))),
    ("exhausted memory is not given back", "out_of_memory", "op empty", _hoard),
), base="sim", environment=SMALL)  # fmt: skip


def _count(self: Any, phase: Phase) -> None:
    self.marks = getattr(self, "marks", 0) + 1


GRAPHS: Mapping[str, Changes] = {
    "mark_step is declared and does nothing": {"class graph.accumulates": lambda u: True},
    "mark_step works but is declared missing":
        {"graph.mark_step": lambda u, phase: kept.append(phase),
         "graph.counters": lambda u: {"n": len(kept)}},
    "the graph limit is ignored":
        {"class graph.limit": lambda u: 20, "graph.counters": lambda u: {"graphs": 0.0}},
}  # fmt: skip
for _name, _changes in GRAPHS.items():
    mutant(_name, "device", "graphs_end", _changes)


# -- the contract's collectives -------------------------------------------------------------------


def flat(tensor: Any, start: int) -> Any:
    """As many elements of the memory as the tensor has, from one on, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), start)


def beside(tensor: Any) -> None:
    """Write one element behind a tensor, if there is one."""
    end = tensor.storage_offset() + tensor.numel()
    if end < tensor.untyped_storage().nbytes() // tensor.element_size():
        tensor.as_strided((1,), (1,), end).zero_()


def _own_first(u: Any, t: Any, op: str, g: Any) -> Any:
    """A sum that each rank begins with its own."""
    import torch.distributed as dist

    if op != "sum" or not t.is_floating_point():
        return u(t, op, g)
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size(g))]
    dist.all_gather(parts, t.contiguous(), group=g)
    for part in parts[rank() + 1 :] + parts[: rank()]:
        t.add_(part)
    return t


REDUCES: Sequence[tuple[str, str, int, Change]] = (  # usual, tensor, op, group
    ("sums are reduced in bfloat16", "contract_sum", 2,
     lambda u, t, op, g: t.copy_(u(t.bfloat16(), op, g))),
    ("all_reduce is not in place", "contract_sum", 2, lambda u, t, op, g: u(t.clone(), op, g)),
    ("one rank refuses to reduce nothing", "contract_sum", 2, lambda u, t, op, g:
     u(t, op, g) if t.numel() else rank() and fail(RuntimeError, "no elements")),
    ("views are summed as their memory lies", "contract_sum", 2, lambda u, t, op, g:
     u(t, op, g) if t.is_contiguous() else then(u(flat(t, t.storage_offset()), op, g), t)),
    ("int64 is summed in float64", "contract_sum", 2, lambda u, t, op, g:
     t.copy_(u(t.double(), op, g)) if t.dtype is torch.int64 else u(t, op, g)),
    ("a subgroup is forgotten", "contract_sum", 3, lambda u, t, op, g: u(t, op)),
    ("the mean in a subgroup divides by all", "contract_mean", 3, lambda u, t, op, g:
     u(t, "sum", g).div_(int(os.environ["WORLD_SIZE"])) if op == "mean" else u(t, op, g)),
    ("the maximum starts at zero", "contract_max", 2,
     lambda u, t, op, g: u(t, op, g).clamp_(min=0)),
    ("each rank begins its sum with its own", "ranks_agree", 3, _own_first),
)  # fmt: skip
for _name, _check, _ranks, _change in REDUCES:
    lines("ranks", (
        (_name, _check, "collectives.all_reduce",
         lambda u, t, op="sum", group=None, change=_change: change(u, t, op, group)),
    ), base="sim", ranks=_ranks)  # fmt: skip


lines("ranks", (
    ("always broadcasts rank 0", "contract_broadcast", "collectives.broadcast",
     lambda u, t, source=0: u(t, 0)),
    ("a view that was sent stays", "contract_broadcast", "collectives.broadcast",
     lambda u, t, source=0: u(t.contiguous(), source)),
    ("ranks are swapped in a gather", "contract_all_gather", "collectives.all_gather",
     lambda u, t: u(t)[::-1]),
    ("a gather works in its input", "contract_all_gather", "collectives.all_gather",
     lambda u, t: then(p := u(t), t.copy_(p[-1]), p)),
    ("the own part is the input", "contract_all_gather", "collectives.all_gather",
     lambda u, t: [t if n == rank() else p for n, p in enumerate(u(t))]),
    ("barrier does nothing", "barrier_waits", "collectives.barrier", lambda u: None),
    ("patience ends by itself", "barrier_waits", "collectives.patient_timeout",
     lambda u, then: nullcontext()),
    ("groups are opened without a limit", "limits_hold", "collectives.open",
     lambda u, **given: u(**{**given, "timeout_s": 1800.0})),
    ("the limit of groups is set for none", "limits_hold", "collectives.set_timeout",
     lambda u, seconds: ()),
    ("integers in objects become floats", "host_messages", "collectives.gather_objects",
     lambda u, v: json.loads(json.dumps(u(v)), parse_int=float)),
    ("bytes are filled up", "host_messages", "collectives.gather_bytes",
     lambda u, v: [b.ljust(len(v) + 1) for b in u(v)]),
    ("host sums lose digits", "host_messages", "collectives.sum_on_host",
     lambda u, values: u(torch.tensor(values).tolist())),
    ("memory is the first device's", "memory_of_each_rank", "placement.memory",
     lambda u: replace(u(), in_use=2**20, peak=2**20) if rank() else u()),
), base="sim")  # fmt: skip


# -- torch.distributed: a function gives its result in a wrong way, in some cases ------------------


def on_card(tensor: Any) -> bool:
    """Whether it is of the simulated card: messages between hosts stay right."""
    return isinstance(tensor, torch.Tensor) and bool(tensor.device.type == "sim")


def shorter(t: Any) -> Any:
    """Values that went through half of the bits."""
    if t.dtype.itemsize == 2:
        return (t.contiguous().view(torch.int16) & -16).view(t.dtype)
    return (t.bfloat16() if t.is_floating_point() else t.int()).to(t.dtype)


def exchange_ends(t: Any) -> None:
    values = t.reshape(-1)
    if len(values):
        values = torch.cat([values[-1:], values[1:-1], values[:1]]) if len(values) > 1 else values
        t.copy_(values.reshape(t.shape))


def in_group(kwargs: Any) -> bool:
    import torch.distributed as dist

    return kwargs.get("group") not in (None, dist.group.WORLD)


class Handle:
    """Of work whose result is spoilt, or comes, when it is waited for."""

    def __init__(self, then: Callable[[], Any], work: Any = None) -> None:
        self._then, self._work = then, work

    def wait(self, *args: Any) -> Any:
        found = None if self._work is None else self._work.wait(*args)
        self._then()
        return found

    def get_future(self) -> Any:
        """One that is done at once."""
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def spoilt(way: Change, when: Callable[[Any, Any], Any], beyond: bool) -> Change:
    """A function that gives its (last) result in a wrong way in some cases, once it was waited for.

    Args:
        way: changes the result; beyond it: what the function was given.
        when: gets the result and named arguments.
    """

    def call(usual: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        t = result[-1] if isinstance(result, list) else result
        work = usual(result, *args, **kwargs)
        if not on_card(t) or not when(t, kwargs):
            return work
        turns = iter([args[0] if beyond else t])

        def spoil() -> None:
            for each in turns:  # the first time alone
                way(each)

        return Handle(spoil, work) if hasattr(work, "wait") else spoil()

    return call


def roll(t: Any) -> Any:
    return t.copy_(t.reshape(-1).roll(1).reshape(t.shape))


SPOILT: Sequence[tuple[str, str, Change, Callable[[Any, Any], Any]]] = (
    ("all_reduce", "too large by a part, in a subgroup", lambda t: t.mul_(1.03125),
     lambda t, k: in_group(k)),
    ("all_reduce", "ends exchanged, waited for", exchange_ends, lambda t, k: k.get("async_op")),
    ("broadcast", "one place further, of integers", roll, lambda t, k: t.dtype is torch.int64),
    ("all_gather", "in a shorter type, large", lambda t: t.copy_(shorter(t)),
     lambda t, k: t.numel() >= 2**15),
    ("all_gather", "and its input, always", lambda t: t.add_(1), lambda t, k: True),
    ("all_gather_into_tensor", "ends exchanged, two-byte", exchange_ends,
     lambda t, k: t.dtype.itemsize == 2),
    ("all_gather_into_tensor", "and beside it, of a view", beside,
     lambda t, k: t.storage_offset() > 0),
    ("reduce_scatter_tensor", "without its last, of a view", lambda t: t.view(-1)[-1:].zero_(),
     lambda t, k: t.storage_offset() > 0),
    ("all_to_all_single", "in a shorter type, of integers", lambda t: t.copy_(shorter(t)),
     lambda t, k: t.dtype is torch.int64),
    ("recv", "one place further, of a view", roll, lambda t, k: t.storage_offset() > 0),
    ("irecv", "ends exchanged, always", exchange_ends, lambda t, k: True),
)  # fmt: skip
CHECKED = {"reduce_scatter_tensor": "reduce_scatter", "recv": "send_and_recv"}
CHECKED["irecv"] = CHECKED["recv"]
for _function, _how, _change, _case in SPOILT:
    _way = spoilt(_change, _case, "its input" in _how)
    lines("ranks", [
        (f"{_function}: {_how}", CHECKED.get(_function, _function), f"dist {_function}", _way),
    ], base="sim", ranks=3 if "subgroup" in _how else 2)  # fmt: skip


def _summed_means(usual: Any, t: Any, op: Any = None, *args: Any, **kwargs: Any) -> Any:
    import torch.distributed as dist

    wrong = op is None or (on_card(t) and op == dist.ReduceOp.AVG)
    return usual(t, dist.ReduceOp.SUM if wrong else op, *args, **kwargs)


# -- handles: what is wrong is when a result gets to its tensor ------------------------------------


def handled(wait: Callable[[list[Any], int], Any]) -> Change:
    """A function whose asynchronous work is done apart when it is started.

    Args:
        wait: gets what has been started so far (each writes its result), and the number of this
            one; gives what its wait does.
    """

    def call(usual: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op") or not on_card(result):
            return usual(result, *args, **kwargs)
        apart = result.clone()
        usual(apart, *args, **{**kwargs, "async_op": False})
        kept.append(functools.partial(result.copy_, apart))
        return Handle(wait(kept, len(kept) - 1))

    return call


def _once_more(started: list[Any], n: int) -> Callable[[], Any]:
    waits = itertools.count()
    return lambda: started[n]().add_(next(waits))


def nothing() -> None:
    pass


def _given_away(usual: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    """A gather that holds its input by no name."""
    if not kwargs.get("async_op") or not on_card(output):
        return usual(output, given, *args, **kwargs)
    source = weakref.ref(given)
    return Handle(lambda: usual(output, source()) if source() is not None else output.fill_(-1))


def _overtaking(usual: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """A sum that is made before the work that was put off."""
    if not on_card(t):
        return usual(t, *args, **kwargs)
    usual(t, *args, **{**kwargs, "async_op": False})
    while kept:
        kept.pop()()
    return Handle(nothing)


GATHER, IN_ORDER = "all_gather_into_tensor", "in_order_with_work"
lines("ranks", (
    ("the library's mean is a sum", "all_reduce_mean", "dist all_reduce", _summed_means),
    ("the output is cleared before the input is read", GATHER, f"dist {GATHER}",
     lambda u, out, *a, **k: then(out.zero_(), u(out, *a, **k))),
    ("the device's barrier does not wait", "barrier_waits", "dist barrier",
     lambda u, group=None, **k: None if group is None else u(group, **k)),
    ("a group's own limit is that of all", "limits_hold", "dist new_group",
     lambda u, ranks=None, timeout=None, **k: u(ranks, **k)),
    ("a future is done when its work has begun", "handles", "dist all_reduce",
     handled(lambda s, n: s[n])),
    ("a wait ends the work before", "handles", "dist all_reduce",
     handled(lambda s, n: s[n - 1] if n else nothing)),
    ("a second wait writes something else", "handles", f"dist {GATHER}", handled(_once_more)),
    ("a running input is given away", IN_ORDER, f"dist {GATHER}", _given_away),
), base="sim")  # fmt: skip
mutant("a collective overtakes the work before", "ranks", IN_ORDER, {
    "op sub_": lambda u, t, n: then(kept.append(lambda: t.add_(n, alpha=-1)), t),
    "dist all_reduce": _overtaking,
}, base="sim")  # fmt: skip
