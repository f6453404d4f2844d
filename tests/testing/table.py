# mypy: disable-error-code="func-returns-value,misc"
"""Wrong devices, a line each: what is wrong, the check that must fail, and what makes it so.

`lines` replaces one thing of a sound backend (``cpu``, or the simulated card ``sim`` where its own
tensors must be told from the host's). Those of torch's operators are beside this file.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import itertools
import json
import math
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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import field_validator

from anygauge.interface import (
    Backend,
    Check,
    Compiler,
    Finding,
    LaunchProfile,
    Level,
    NotAvailableError,
    Options,
    PeakFlops,
    Phase,
    Scope,
    Setting,
    ShapePolicy,
    Support,
)
from anygauge_cpu.options import CpuOptions
from tests.testing.wrong import Wrong, line, mutant, torch

FOR_EVER = 10**6
LARGE = 2**20
HELPER = [sys.executable, "-c", "import time; time.sleep(60)"]
Change = Callable[..., Any]
kept: list[Any] = []
"""What a mutant remembers; each has a process of its own."""


def lines(part: str, check: str, target: str, changes: Mapping[str, Change], **more: Any) -> None:
    """Mutants of one target that one check finds, by name."""
    for name, change in changes.items():
        line(name, part, check, target, change, **more)


def then(*done: Any) -> Any:
    """The last of what was done one after the other."""
    return done[-1]


def fail(kind: type[Exception], words: str) -> Any:
    raise kind(words)


def rank() -> int:
    return int(os.environ["RANK"])


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def capability(name: str, of: Level, why: str) -> Change:
    return lambda usual: {**usual, name: Support(of, why)}


# -- on paper -------------------------------------------------------------------------------------


def figures_by_torch() -> Mapping[str, float]:
    return {"memory": float(torch.finfo(torch.float32).max)}


def figures_below_zero() -> Mapping[str, float]:
    return {"memory": -1}


def made_probe() -> Any:
    """A function of a module that only this process has."""
    made = types.ModuleType("made_by_the_mutant")
    exec("def probe(): return None", made.__dict__)
    sys.modules[made.__name__] = made
    return made.probe


PROBES: Mapping[str, Mapping[str, Change]] = {
    "probe_is_pure": {
        "probe imports torch": lambda u: then(torch.float32, u()),
        "probe is slow": lambda u: then(time.sleep(3), u()),
        "probe sets a variable": lambda u: then(os.environ.update(WAS_HERE="1"), u()),
        "probe varies": lambda u: replace(u(), notes=(str(random.random()),)),
        "probe raises": lambda u: fail(RuntimeError, "no driver"),
    },
    "probe_answers": {
        "finding without words": lambda u: replace(u(), software=Finding.yes("")),
        "four of what is missing": lambda u: replace(u(), devices=Finding.no("no card")),
        "available with 0 devices": lambda u: replace(u(), device_count=0),
        "its cards are letters": lambda u: replace(u(), cards="card"),
        "one name stands for four cards": lambda u: replace(u(), cards=("card",) * 4),
    },
}
for _check, _changes in PROBES.items():
    lines("basic", _check, "probe", _changes)
SPECS: Mapping[tuple[str, str], Mapping[str, Change]] = {
    ("spec_pickles", "probe"): {
        "its probe is made as it is imported": made_probe,
    },
    ("spec_pickles", "this_machine"): {"figures come from torch": lambda: figures_by_torch},
    ("hardware_file_is_sound", "this_machine"): {
        "the machine's memory is -1, for unknown": lambda: figures_below_zero,
    },
    ("hardware_file_is_sound", "hardware"): {
        "the cards are not in the package": lambda: "anygauge_cpu:none.toml",
    },
    ("announced", "name"): {"its name is in upper case": lambda: "MUTANT"},
    ("api_version", "api_version"): {"it was written for a later contract": lambda: 2},
}
for (_check, _field), _changes in SPECS.items():
    lines("basic", _check, f"spec.{_field}", _changes)
DESCRIBED: Mapping[str, Mapping[str, Change]] = {
    "backend.name": {"another name": lambda u: "other"},
    "backend.unsupported_engines": {
        "an engine is refused without a reason": lambda u: {"deepspeed": ""},
    },
    "backend.capabilities": {
        "a capability that nobody asks about": capability("zero", Level.FULL, ""),
        "a reason is a note to oneself": capability("float16", Level.PARTIAL, "TODO"),
        "switched off, who knows by what": capability("float16", Level.SWITCHED_OFF, "not today"),
    },
    "backend.libraries": {"a comma is missing after the only library": lambda u: "vendor-torch"},
    "backend.files": {"a library's path depends on the folder": lambda u: ("lib/libmutant.so",)},
    "backend.launch": {
        "the visibility variable comes with its value": lambda u: LaunchProfile(
            visibility_variable="MUTANT_VISIBLE=0"
        )
    },
}
for _target, _changes in DESCRIBED.items():
    lines("basic", "described", f"class {_target}", _changes)
line(
    "announcing it imports a library of tensors",
    *("basic", "light_import", "at import"),
    lambda: sys.modules.update(jax=types.ModuleType("jax")),  # heavy by its name
)
line(
    "a closed device is none",
    "basic",
    "closed_device_says_so",
    "class placement.device",
    lambda u: None,
)
line(
    "padded beyond the maximum",
    *("basic", "shapes_are_sound", "class graph.shapes"),
    lambda u: type("Longer", (ShapePolicy,), {"padded_length": lambda s, a, m: m + 1})(),
)
line(
    "a check of doctor has no words",
    *("basic", "diagnostics_are_sound", "backend.diagnostics"),
    lambda usual: [*usual(), Check(name="driver", outcome="pass", seen="")],
)


def _shared(on: Wrong, backend: Backend, name: str) -> None:
    kept.append(getattr(backend, name))
    setattr(backend, name, kept[0])


MADE: Mapping[str, tuple[str, Change]] = {
    "opens when it is made": ("light_construction", lambda on, b: b.placement.open(0)),
    "instances share a placement": (
        "facets_are_its_own",
        lambda on, b: _shared(on, b, "placement"),
    ),
}
for _name, (_check, _change) in MADE.items():
    mutant(_name, part="basic", check=_check)(
        lambda on, change=_change: on.made(lambda backend: change(on, backend))
    )


class AnyOption(CpuOptions, extra="allow"):
    """It takes options that it does not have."""


class LevelOptions(Options):
    """A wrong value of its option ends in a KeyError."""

    level: Any = "low"

    @field_validator("level")
    @classmethod
    def _read(cls, value: Any) -> int:
        return {"low": 1, "high": 2}[str(value)]


def _leveled(on: Wrong) -> None:
    on.spec(options=f"{__name__}:LevelOptions")
    on.method("backend.__init__")(lambda self, usual, options=None: Backend.__init__(self, options))


OPTIONS: Mapping[str, Change] = {
    "takes any option": lambda on: on.spec(options=f"{__name__}:AnyOption"),
    "a wrong value ends in a KeyError": _leveled,
}
for _name, _change in OPTIONS.items():
    mutant(_name, part="basic", check="options_are_checked")(_change)


def level(value: Any = "1", scope: Scope = Scope.JOB, **more: Any) -> list[Setting]:
    """One setting more."""
    fields = {"name": "MUTANT_LEVEL", "reason": "a reason", "source": "a page", "value": str(value)}
    return [Setting(**{**fields, "scope": scope, **more})]


OF_RANK = {"scope": Scope.RANK}
RULES: Mapping[str, Mapping[str, Change]] = {  # each gets the job, the node and the local rank
    "environment_is_pure": {
        "environment varies": lambda j, n, r: level(random.random()),
        "environment sets variables itself": lambda *_: then(os.environ.update(WAS="1"), []),
    },
    "settings_are_sound": {
        "a value that is not a text": lambda *_: [replace(level()[0], value=1)],
        "a setting without a reason": lambda *_: level(reason=""),
        "two rules for one variable": lambda j, n, r: (
            level(name="OMP_NUM_THREADS", scope=Scope.RANK) * (r is not None)
        ),
        "a rule numbers the ranks": lambda j, n, r: (
            level(r, Scope.RANK, name="RANK") * (r is not None)
        ),
    },
    "scopes_hold": {
        "a rank's value without a rank": lambda *_: level(**OF_RANK),
        "the job's variable is set on one machine": lambda j, n, r: level() * (n.rank == 0),
        "the node's value is of two ranks": lambda j, n, r: level((r or 0) // 2, Scope.NODE),
        "the last rank lacks a variable": lambda j, n, r: level() * (r != 7),
    },
    "rules_read_the_node_alone": {
        "a rule reads a variable of the process": lambda *_: level(os.environ.get("DEBUG", 1)),
        "a rule needs a variable that agents lack": lambda *_: level(os.environ["PATH"] and 1),
        "a rule asks this machine for its name": lambda *_: level(socket.gethostname()),
    },
    "rules_hold_on_any_machine": {
        "a rule needs a version that is not known": lambda j, n, r: level(n.libraries["torch"]),
        "a rule takes the second interface": lambda j, n, r: level(
            n.interfaces[1].name, Scope.NODE
        ),
    },
}
for _check, _changes in RULES.items():
    lines("basic", _check, "settings", _changes)


# -- what is left behind, at each step of a backend's life -----------------------------------------


def sleeper(seconds: float = 20, daemon: bool = False) -> None:
    threading.Thread(target=time.sleep, args=(seconds,), daemon=daemon).start()


def orphan() -> None:
    """A helper whose parent has ended, as services are started."""
    code = f"import subprocess; subprocess.Popen({HELPER!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def libc() -> Any:
    return ctypes.CDLL(None)


LEFT: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "output": {
        "prints": lambda: print("Vendor SDK 3.1"),
        "prints in C": lambda: libc().printf(b"Vendor SDK 3.1\n"),
    },
    "signals": {
        "takes SIGTERM": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
        "ends at closed pipes": lambda: libc().signal(int(signal.SIGPIPE), None),
        "blocks Ctrl-C": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}),
    },
    "variables": {
        "corrects variables": lambda: os.environ.update(OMP_NUM_THREADS="64", MUTANT="3"),
        "clears a variable": lambda: os.environ.pop("PYTHONPATH", None),
    },
    "settings": {
        "hides warnings": lambda: warnings.filterwarnings("ignore"),
        "changes the folder": lambda: os.chdir("/"),
    },
    "settings ": {
        "rounds small numbers to 0": lambda: torch.set_flush_denormal(True),
        "makes weights bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
        "makes tensors on it": lambda: torch.set_default_device("meta"),
        "records no gradients": lambda: torch.set_grad_enabled(False),
    },
    "files": {"writes a log": lambda: Path("vendor.log").write_text("opened\n")},
    "running": {
        "leaves a thread": sleeper,
        "leaves a helper": lambda: subprocess.Popen(HELPER),
        "leaves a service": orphan,
    },
}
"""By the kind of what is left; with a blank behind it those that torch keeps, so not on paper."""
STEPS = {
    "basic": ("at import", "probe", "at make", "settings"),
    "device": ("placement.open", "placement.close"),
    "ranks": ("collectives.open", "collectives.close"),
}


def acts(target: str, act: Callable[[], Any]) -> Change:
    """Do what is usual, then `act`."""
    if target.startswith("at "):
        return act
    if target == "settings":
        return lambda *_: then(act(), [])
    return lambda usual, *args, **kwargs: (usual(*args, **kwargs), act())[0]


for _kind, _acts in LEFT.items():
    for _turn, (_name, _act) in enumerate(_acts.items()):
        for _part, _targets in STEPS.items():
            # Each at one step of each part, in turn.
            _at = _targets[_turn % len(_targets)]
            if _part != "basic" or not _kind.endswith(" "):
                _check = f"{_part}_leaves_{_kind.strip()}"
                line(f"{_name} ({_at})", _part, _check, _at, acts(_at, _act))


def never(*_: Any, **__: Any) -> None:
    time.sleep(FOR_EVER)


GONE = "the driver is gone"
line("aborts at its end", "basic", "ends_on_paper", "at make", lambda: atexit.register(os.abort))
lines("device", "closes", "placement.close", {"close leaves it open": lambda u: None})
lines("ranks", "leaves_no_group", "collectives.close", {"leaving keeps the group": lambda u: None})
lines(
    *("device", "ends_on_device", "backend.close"),
    {"close raises": lambda u: then(u(), fail(RuntimeError, GONE))},
)
lines(
    *("ranks", "ends_on_ranks", "placement.close"),
    {"a rank's device does not close": lambda u: then(u(), rank() and fail(RuntimeError, GONE))},
)
for _name, _part, _check, _target, _change in (
    ("a new peak never begins", "device", "memory_moves", "placement.reset_peak", never),
    (
        *("the process never ends", "device", "ends_on_device", "placement.close"),
        acts("placement.close", lambda: sleeper(FOR_EVER)),
    ),
    (
        *("rank 1 never comes to a barrier", "ranks", "barrier_waits", "collectives.barrier"),
        lambda u: then(rank() and never(), u()),
    ),
):
    line(_name, _part, _check, _target, _change, limit_s=6)


# -- on a device ----------------------------------------------------------------------------------

SAVED = "every_generator_is_saved"
SMALL = {"ANYGAUGE_SIM_CAPACITY": str(2**28)}
EXHAUSTED, PEAK = "out_of_memory", "memory_moves"


def refused(error: BaseException) -> int:
    """Bytes that a simulated card refused."""
    text = str(error).partition("out of memory: ")[2].partition(" ")[0]
    return int(text) if text.isdigit() else 0


MEMORY: Mapping[str, Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    PEAK: {
        "memory never moves": lambda m: {"in_use": 2**30, "peak": 2**30},
        "peak is only now": lambda m: {"peak": m.in_use},
        "peak is half of what came on top": lambda m: {"peak": (m.peak + m.in_use) // 2},
    },
    "memory_is_counted": {
        "memory of no known kind": lambda m: {"kind": "some"},
        "memory is counted in mebibytes": lambda m: {"in_use": m.in_use / 2**20},
        "the limit is what is free": lambda m: {"limit": 2**40 - m.in_use},
    },
}
for _check, _memory in MEMORY.items():
    for _name, _change in _memory.items():
        line(
            *(_name, "device", _check, "placement.memory"),
            lambda u, change=_change: replace(u(), **change(u())),
        )
line(
    *("the limit is half of what is given", "device", EXHAUSTED, "placement.memory"),
    lambda u: replace(u(), limit=u().limit // 2 + 2**20),
    base="sim",
    environment=SMALL,
)


def spoil() -> None:
    """Write over the first large piece that is held on a simulated card."""
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type == "sim" and each.numel() >= LARGE:
            each[: LARGE // 2].fill_(77)
            return


line(
    *("what is refused takes the place of what is held", "device", EXHAUSTED),
    "placement.is_out_of_memory",
    lambda u, e: then(spoil(), u(e)),
    base="sim",
    environment=SMALL,
)
OF_PLACEMENT: Mapping[tuple[str, str], Mapping[str, Change]] = {
    (PEAK, "reset_peak"): {"peak cannot be reset": lambda u: None},
    ("seeds_of_ranks_differ", "seed"): {"seed is ignored": lambda u, seed: u(0)},
    (SAVED, "seed"): {
        "the device is not seeded": lambda u, seed: torch.default_generator.manual_seed(seed),
        "the host is not seeded": lambda u, seed: then(
            state := torch.get_rng_state(), u(seed), torch.set_rng_state(state)
        ),
    },
    (SAVED, "set_rng_state"): {"state is not restored": lambda u, state: None},
    ("autocast_casts", "autocast"): {
        "autocast is ignored": lambda u, dtype: nullcontext(),
        "autocast lowers float32, too": lambda u, dtype: u(torch.bfloat16),
    },
    ("copies_keep_values", "to_device"): {
        "integers become floats": lambda u, b: u(b).float() if hasattr(b, "float") else u(b),
    },
    ("queued_copies_stay_apart", "to_device"): {
        "nested tensors stay behind": lambda u, b: {
            k: v if isinstance(v, Mapping) else u(v) for k, v in b.items()
        },
    },
    ("opens", "open"): {"opening gives the host": lambda u, r: then(u(r), torch.device("cpu"))},
    ("too_large_rank", "open"): {
        "a rank without a device learns no number": lambda u, r: (
            fail(NotAvailableError, "none") if r > 100 else u(r)
        )
    },
    (EXHAUSTED, "is_out_of_memory"): {
        "every error is out of memory": lambda u, e: True,
        "exhausted memory is any error": lambda u, e: False,
        "huge requests are unknown": lambda u, e: u(e) and 0 < refused(e) < 2**50,
    },
    ("utilisation_is_sound", "utilisation"): {
        "more than wholly busy": lambda u: {"utilisation_percent": 130.0},
        "busy as a text": lambda u: {"utilisation_percent": "30"},
        "busy in no unit": lambda u: {"busy": 0.5},
    },
}
for (_check, _method), _changes in OF_PLACEMENT.items():
    lines("device", _check, f"placement.{_method}", _changes, base="sim")
line(
    *("small requests are unknown", "device", EXHAUSTED, "placement.is_out_of_memory"),
    lambda u, e: u(e) and refused(e) > 2**24,
    base="sim",
    environment=SMALL,
)
clock = itertools.count(10**12, 10**9)
RATES: Mapping[str, Callable[[str], float | None]] = {
    "a rate is beyond all devices": {"bfloat16": 1e18}.get,
    "bfloat16 is slower than float32": {"bfloat16": 1e13, "float32": 2e13}.get,
    "a rate is known of every type": lambda dtype: 1e13,
    "a peak rate that is measured each time": lambda dtype: float(next(clock)),
}
for _name, _rate in RATES.items():
    line(
        *(_name, "device", "peak_rates", "placement.peak_flops"),
        lambda u, dtype, rate=_rate: rate(dtype) and PeakFlops(value=rate(dtype), source="a page"),
    )
lines(
    *("device", "devices_are_counted", "probe"),
    {"the probe counts halves of devices": lambda u: replace(u(), device_count=16)},
    base="sim",
)
hidden = {
    "the visibility variable has another name": lambda u: LaunchProfile(visibility_variable="V")
}
lines("device", "devices_are_counted", "class backend.launch", hidden, base="sim")
line(
    *(
        "opening settles nothing",
        "device",
        "capabilities_are_settled",
        "class backend.capabilities",
    ),
    capability("float16", Level.DEPENDS, "so it says"),
)
line(
    *("float16 works but is declared missing", "device", "float16_arithmetic"),
    *("class backend.capabilities", capability("float16", Level.UNSUPPORTED_BY_HARDWARE, "so")),
)


def _count(self: Any, phase: Phase) -> None:
    self.marks = getattr(self, "marks", 0) + 1


def _fail_after_backward(self: Any, phase: Phase) -> None:
    if phase is Phase.BACKWARD:
        raise RuntimeError("no graph")


def _set(attributes: Mapping[str, Any], on: Wrong) -> None:
    for name, value in attributes.items():
        setattr(on.graph, name, value)


def _twice(graph: Any, inputs: Any) -> Any:
    return lambda *given: tuple(2 * each for each in graph.forward(*given))


GRAPHS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mark_step is declared and does nothing": (
        "mark_step_is_real",
        {"accumulates": True, "mark_step": lambda self, phase: None},
    ),
    "mark_step works but is declared missing": (
        "mark_step_is_real",
        {"mark_step": _count, "counters": lambda self: {"n": getattr(self, "marks", 0)}},
    ),
    "the graph limit is ignored": (
        "graph_limit_holds",
        {"limit": 20, "counters": lambda self: {"graphs": 0.0}},
    ),
    "mark_step fails after backward": (
        "mark_step_is_harmless",
        {"mark_step": _fail_after_backward},
    ),
    "compiled graphs give twice the result": (
        "compiles",
        {"compiler": Compiler(backend=_twice, regions="model")},  # type: ignore[arg-type]
    ),
}
for _name, (_check, _attributes) in GRAPHS.items():
    mutant(_name, part="device", check=_check)(functools.partial(_set, _attributes))


@mutant("products are 0 after memory was exhausted", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return usual(*args, **kwargs)
        except RuntimeError as error:
            kept.append(type(error))
            raise

    on.operation("mm")(lambda usual, a, b: usual(a, b) * (0 if kept else 1))


@mutant("exhausted memory is not given back", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ.update(SMALL)

    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        if 2**21 < out.numel() <= 2**22:
            kept.append(out)
        return out


@mutant("sums vary, and it does not say so", part="device", check="same_bits_again", base="sim")
def _(on: Wrong) -> None:
    turns = itertools.count()
    on.operation("mm")(lambda usual, a, b: usual(a, b) * (1 + 2.0**-20 * (next(turns) % 3 == 0)))


# -- the contract's collectives -------------------------------------------------------------------


def flat(tensor: Any, start: int) -> Any:
    """As many elements of the memory as the tensor has, from one on, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), start)


def beside(tensor: Any) -> None:
    """Write one element behind a tensor, if there is one."""
    end = tensor.storage_offset() + tensor.numel()
    if end < tensor.untyped_storage().nbytes() // tensor.element_size():
        tensor.as_strided((1,), (1,), end).zero_()


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


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


INF = math.inf
REDUCES: Mapping[tuple[str, int], Mapping[str, Change]] = {  # usual, tensor, op, group
    ("contract_sum", 2): {
        "sums are reduced in bfloat16": lambda u, t, op, g: t.copy_(u(t.bfloat16(), op, g)),
        "all_reduce is not in place": lambda u, t, op, g: u(t.clone(), op, g),
        "beyond 4 MiB is no sum": lambda u, t, op, g: then(
            u(t[:LARGE] if t.dim() == 1 else t, op, g), t
        ),
        "NaN counts as zero": lambda u, t, op, g: u(
            t.nan_to_num_(0.0, INF, -INF) if t.is_floating_point() else t, op, g
        ),
        "one rank refuses to reduce nothing": lambda u, t, op, g: (
            u(t, op, g) if t.numel() else rank() and fail(RuntimeError, "no elements")
        ),
        "views are summed as their memory lies": lambda u, t, op, g: (
            u(t, op, g) if t.is_contiguous() else then(u(flat(t, t.storage_offset()), op, g), t)
        ),
        "int64 is summed in float64": lambda u, t, op, g: (
            t.copy_(u(t.double(), op, g)) if t.dtype is torch.int64 else u(t, op, g)
        ),
        "sizes are rounded up": lambda u, t, op, g: then(u(t, op, g), beside(t), t),
    },
    ("contract_sum", 3): {"a subgroup is forgotten": lambda u, t, op, g: u(t, op)},
    ("contract_mean", 2): {
        "mean sums": lambda u, t, op, g: u(t, "sum" if op == "mean" else op, g),
        "the mean is returned, the tensor a sum": lambda u, t, op, g: (
            u(t, "sum", g) / world() if op == "mean" else u(t, op, g)
        ),
    },
    ("contract_mean", 3): {
        "the mean in a subgroup divides by all": lambda u, t, op, g: (
            u(t, "sum", g).div_(world()) if op == "mean" else u(t, op, g)
        ),
    },
    ("contract_max", 2): {
        "max sums": lambda u, t, op, g: u(t, "sum" if op == "max" else op, g),
        "the maximum starts at zero": lambda u, t, op, g: u(t, op, g).clamp_(min=0),
    },
    ("ranks_agree", 3): {"each rank begins its sum with its own": _own_first},
    ("within_backward", 2): {
        "nothing is summed within backward": lambda u, t, op, g: t if in_backward() else u(t, op, g)
    },
    ("all_reduce_unknown", 2): {
        "an unknown operation is a sum": lambda u, t, op, g: u(
            t, op if op in ("mean", "max") else "sum", g
        )
    },
}
for (_check, _ranks), _changes in REDUCES.items():
    for _name, _change in _changes.items():
        line(
            *(_name, "ranks", _check, "collectives.all_reduce"),
            lambda u, t, op="sum", group=None, change=_change: change(u, t, op, group),
            base="sim",
            ranks=_ranks,
        )


def _half(u: Any, t: Any, source: int = 0) -> Any:
    u(t, source)
    if t.dim() == 1 and len(t) > LARGE:
        t[LARGE:].copy_(t[: len(t) - LARGE].clone())
    return t


def _shared_buffer(u: Any, t: Any, buffers: dict[Any, Any] = {}) -> Any:  # noqa: B006
    parts = u(t)
    ours = buffers.setdefault((t.shape, t.dtype), parts)
    return [one.copy_(part) for one, part in zip(ours, parts, strict=True)]


CONTRACT: Mapping[tuple[str, str, int], Mapping[str, Change]] = {
    ("contract_broadcast", "broadcast", 2): {
        "always broadcasts rank 0": lambda u, t, source=0: u(t, 0),
        "the memory's start is sent": lambda u, t, source=0: then(u(flat(t, 0), source), t),
        "a view that was sent stays": lambda u, t, source=0: u(t.contiguous(), source),
        "a large broadcast repeats its first half": _half,
    },
    ("contract_broadcast", "broadcast", 3): {
        "any source but 0 is the last rank": lambda u, t, source=0: u(t, source and 2)
    },
    ("contract_all_gather", "all_gather", 3): {
        "ranks 1 and 2 are swapped in a gather": lambda u, t: [u(t)[n] for n in (0, 2, 1)]
    },
    ("contract_all_gather", "all_gather", 2): {
        "int64 is gathered as int32": lambda u, t: (
            [p.long() for p in u(t.int())] if t.dtype is torch.int64 else u(t)
        ),
        "a gather works in its input": lambda u, t: then(p := u(t), t.copy_(p[-1]), p),
        "the own part is the input": lambda u, t: [
            t if n == rank() else p for n, p in enumerate(u(t))
        ],
        "gathers of one shape share a buffer": _shared_buffer,
    },
    ("barrier_waits", "barrier", 2): {
        "barrier does nothing": lambda u: None,
    },
    ("barrier_waits", "patient", 2): {"patience ends by itself": lambda u, then: nullcontext()},
    ("limits_hold", "open", 2): {
        "groups are opened without a limit": lambda u, **given: u(**{**given, "timeout_s": 1800.0})
    },
    ("limits_hold", "limit", 2): {"the limit of groups is set for none": lambda u, seconds: ()},
    ("gathers_objects", "gather_objects", 2): {
        "integers in objects become floats": lambda u, v: json.loads(
            json.dumps(u(v)), parse_int=float
        ),
    },
    ("gathers_objects", "gather_bytes", 2): {
        "bytes are filled up": lambda u, v: [b.ljust(len(v) + 1) for b in u(v)]
    },
    ("sums_on_host", "sum_on_host", 2): {
        "host sums lose digits": lambda u, values: u(torch.tensor(values).tolist())
    },
}
for (_check, _method, _ranks), _changes in CONTRACT.items():
    lines("ranks", _check, f"collectives.{_method}", _changes, base="sim", ranks=_ranks)


@mutant("every rank opens the same device", part="ranks", check="devices_differ")
def _(on: Wrong) -> None:
    @on.method("placement.open")
    def open_(self: Any, usual: Any, local_rank: int) -> Any:
        device = usual(local_rank)
        self._device = type(device)(device.type, 0)
        return self._device


line(
    *("collectives work but are declared missing", "ranks", "contract_sum"),
    *("class backend.capabilities", capability("collectives", Level.NOT_WRITTEN_YET, "so")),
)


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


WAYS: Mapping[str, Callable[[Any], Any]] = {
    "one place further": lambda t: t.copy_(t.reshape(-1).roll(1).reshape(t.shape)),
    "ends exchanged": exchange_ends,
    "without its last": lambda t: t.view(-1)[-1:].zero_(),
    "too large by a part": lambda t: t.copy_(t * 1.03125),
    "in a shorter type": lambda t: t.copy_(shorter(t)),
    "backwards": lambda t: t.copy_(t.reshape(-1).flip(0).reshape(t.shape)),
    "and beside it": beside,
    "from the storage": lambda t: None,
    "and its input": lambda t: None,
}
WHEN: Mapping[str, Callable[[Any, Any], bool]] = {
    "always": lambda t, kwargs: True,
    "large": lambda t, kwargs: t.numel() >= 2**15,
    "of a view": lambda t, kwargs: t.storage_offset() > 0,
    "two-byte": lambda t, kwargs: t.dtype.itemsize == 2,
    "no 16 divides it": lambda t, kwargs: t.numel() % 16 > 0,
    "of integers": lambda t, kwargs: t.dtype is torch.int64,
    "of rows": lambda t, kwargs: t.dim() == 2,
    "in a subgroup": lambda t, kwargs: in_group(kwargs),
    "waited for": lambda t, kwargs: bool(kwargs.get("async_op")),
    "within backward": lambda t, kwargs: in_backward(),
}
NEWER = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


class Handle:
    """Of work whose result is spoilt, or comes, when it is waited for."""

    def __init__(self, then: Callable[[], Any], work: Any = None) -> None:
        self._then, self._work = then, work

    def wait(self, *args: Any) -> Any:
        found = None if self._work is None else self._work.wait(*args)
        self._then()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def exchanged(name: str, check: str, call: Change, *functions: str, ranks: int = 2) -> None:
    """A line: functions of torch.distributed are `call`, which gets the usual one first."""
    change = lambda on: on.distributed(*functions)(call)  # noqa: E731
    mutant(name, part="ranks", check=check, base="sim", ranks=ranks)(change)


def spoilt(function: str, way: str, when: str, check: str = "") -> None:
    """A line: a function gives its (last) result in a wrong way."""

    def call(usual: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        t = result[-1] if isinstance(result, list) else result
        if not on_card(t) or not WHEN[when](t, kwargs):
            return usual(result, *args, **kwargs)
        if way == "from the storage":
            first = [flat(a, 0).view(a.shape) if on_card(a) else a for a in args[:1]]
            args = (*first, *args[1:])
            result = result if any(map(on_card, first)) else flat(result, 0)
        work = usual(result, *args, **kwargs)
        done: list[int] = []

        def spoil() -> None:
            if not done:
                done.append(1)
                WAYS[way](t)
                if way == "and its input":
                    args[0].add_(1)

        return Handle(spoil, work) if hasattr(work, "wait") else spoil()

    names = {function, NEWER.get(function, function)}
    ranks = 3 if when == "in a subgroup" else 2
    name = f"{function}: {way}, {when}"
    exchanged(name, check or function, call, *names, ranks=ranks)


SPOILT: Mapping[str, Mapping[str, str]] = {
    "all_reduce": {
        "one place further": "of a view",
        "in a shorter type": "large",
        "too large by a part": "in a subgroup",
        "without its last": "no 16 divides it",
        "ends exchanged": "waited for",
    },
    "broadcast": {
        "one place further": "of integers",
        "backwards": "of rows",
        "without its last": "waited for",
        "from the storage": "of a view",
    },
    "all_gather": {
        "too large by a part": "no 16 divides it",
        "in a shorter type": "large",
        "and beside it": "of a view",
        "and its input": "always",
    },
    "all_gather_into_tensor": {
        "one place further": "of rows",
        "ends exchanged": "two-byte",
        "in a shorter type": "of integers",
        "too large by a part": "waited for",
        "and beside it": "of a view",
    },
    "reduce_scatter_tensor": {
        "too large by a part": "two-byte",
        "in a shorter type": "large",
        "without its last": "of rows",
        "backwards": "in a subgroup",
    },
    "all_to_all_single": {"in a shorter type": "of integers", "and its input": "always"},
    "recv": {"one place further": "of a view", "too large by a part": "in a subgroup"},
}
OTHER_CHECK = {"recv": "send_and_recv"}
for _function, _ways in SPOILT.items():
    for _way, _case in _ways.items():
        spoilt(_function, _way, _case, OTHER_CHECK.get(_function, ""))
spoilt("irecv", "ends exchanged", "always", "send_and_recv")
spoilt("all_reduce", "too large by a part", "within backward", "within_backward")


def another_op(asked: str, instead: str, then: Change = lambda t: None) -> Change:
    """An all_reduce of another operation, whose result is changed after each wait."""

    def call(usual: Any, t: Any, op: Any = None, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None else op
        if not on_card(t) or op != getattr(dist.ReduceOp, asked):
            return usual(t, op, *args, **kwargs)
        work = usual(t, getattr(dist.ReduceOp, instead), *args, **kwargs)
        return then(t) if work is None else Handle(lambda: then(t), work)

    return call


def _swapped(usual: Any, operations: Any) -> Any:
    import torch.distributed as dist

    first, second = (each for each in operations if each.op is dist.irecv)
    first.tensor, second.tensor = second.tensor, first.tensor
    return usual(operations)


def _on_device(usual: Any, group: Any = None, **kwargs: Any) -> Any:
    return None if group is None else usual(group, **kwargs)


def _float_sums(usual: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    if on_card(t) or t.is_floating_point():
        return usual(t, *args, **kwargs)
    short = t.float()
    work = usual(short, *args, **kwargs)
    t.copy_(short)
    return work


GATHER, ALL = "all_gather_into_tensor", "all_reduce"
for _name, _check, _function, _change in (
    ("the library's mean is a sum", "all_reduce_mean", ALL, another_op("AVG", "SUM")),
    ("the library's maximum is a sum", "all_reduce_max", ALL, another_op("MAX", "SUM")),
    ("two messages are swapped", "batch_isend_irecv", "batch_isend_irecv", _swapped),
    (
        *("the output is cleared before the input is read", "all_gather_in_place", GATHER),
        lambda u, out, *a, **k: then(out.zero_(), u(out, *a, **k)),
    ),
    ("the device's barrier does not wait", "barrier_waits", "barrier", _on_device),
    (
        *("a group's own limit is that of all", "limits_hold", "new_group"),
        lambda u, ranks=None, timeout=None, **k: u(ranks, **k),
    ),
    ("the control group sums integers in float32", "control_group", ALL, _float_sums),
):
    exchanged(_name, _check, _change, _function)


@mutant("rows and columns of a mesh are swapped", part="ranks", check="meshes", base="sim", ranks=4)
def _(on: Wrong) -> None:
    @on.when_opened
    def install() -> None:
        from torch.distributed.device_mesh import DeviceMesh

        usual, other = DeviceMesh.get_group, {"dp": "cp", "cp": "dp"}

        def get_group(self: Any, name: Any = None) -> Any:
            return usual(self, other[name] if self.mesh.shape == (2, 2) else name)

        setattr(DeviceMesh, "get_group", get_group)  # noqa: B010  (a method is replaced)


@mutant("taking down a group takes all down", part="ranks", check="subgroups", base="sim")
def _(on: Wrong) -> None:
    on.distributed("destroy_process_group")(lambda u, group=None: then(kept.append(0), u(group)))
    on.distributed("all_reduce")(
        lambda u, t, *a, **k: u(t.clone() if kept and on_card(t) else t, *a, **k)
    )


# -- handles: what is wrong is when a result gets to its tensor ------------------------------------


def handles(name: str, check: str, wait: Callable[[list[Any], int], Any], *functions: str) -> None:
    """A line: asynchronous work is done apart when it is started.

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

    exchanged(name, check, call, *(functions or ("all_reduce",)))


def _once_more(started: list[Any], n: int) -> Callable[[], Any]:
    waits = itertools.count()
    return lambda: started[n]().add_(next(waits))


def nothing() -> None:
    pass


handles("a wait ends the work before", "handles", lambda s, n: s[n - 1] if n else nothing)
handles("work has not ended after a wait", "handles", lambda s, n: nothing)
handles("a second wait writes something else", "handles", _once_more, GATHER, NEWER[GATHER])
handles(
    "backward's handles do not wait",
    "within_backward",
    lambda s, n: nothing if in_backward() else s[n],
)


@mutant("a future is done when its work has begun", part="ranks", check="futures", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def call(usual: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op") or not on_card(t):
            return usual(t, *args, **kwargs)
        apart, work, future = t.clone(), types.SimpleNamespace(), torch.futures.Future()
        usual(apart, *args, **{**kwargs, "async_op": False})
        future.set_result([t])
        work.get_future = lambda: future
        return Handle(
            lambda: t.copy_(apart), types.SimpleNamespace(wait=lambda: None, **vars(work))
        )


@mutant("a running input is given away", part="ranks", check="in_order_with_work", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op") or not on_card(output):
            return usual(output, given, *args, **kwargs)
        source = weakref.ref(given)
        return Handle(lambda: usual(output, source()) if source() is not None else output.fill_(-1))


@mutant(
    "a collective overtakes the work before", part="ranks", check="in_order_with_work", base="sim"
)
def _(on: Wrong) -> None:
    on.operation("sub_")(lambda u, t, n: then(kept.append(lambda: t.add_(n, alpha=-1)), t))

    @on.distributed("all_reduce")
    def call(usual: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        if not on_card(t):
            return usual(t, *args, **kwargs)
        usual(t, *args, **{**kwargs, "async_op": False})
        while kept:
            kept.pop()()
        return Handle(nothing)
