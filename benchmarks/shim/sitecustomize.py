"""Loaded by every Python process of a benchmark: counts or watches.

Python imports ``sitecustomize`` at its start from the first folder of its path that has one; the
benchmark puts this folder there through ``PYTHONPATH``, for all contenders alike. Nothing happens
in a process without a ``RANK``. What is counted of a collective is what a ring algorithm sends per
rank, from the sizes of its tensors: (n-1)/n of the whole for a gather or scatter, twice that for an
all-reduce. It is counted where torch hands the call to its process group, whoever made it.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NoReturn

TRACE = "ANYGAUGE_BENCHMARK_TRACE"
"""Folder for ``traffic-rank{r}.json``."""
WATCH = "ANYGAUGE_BENCHMARK_WATCH"
"""Steps before those that are watched, and their number: ``10:2`` (see `benchmark_watch`)."""
PHASES = "ANYGAUGE_BENCHMARK_PHASES"
"""Set: the folder of the trace also gets the peak of each phase (see `benchmark_watch`)."""


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return int(value.numel() * value.element_size())


Sent = tuple[str, int, Callable[[int], float]]
_GATHER: Sent = ("all_gather", 1, lambda ranks: ranks - 1)
_REDUCE: Sent = ("all_reduce", 0, lambda ranks: 2 * (ranks - 1) / ranks)
_SCATTER: Sent = ("reduce_scatter", 0, lambda ranks: ranks - 1)
_EXCHANGE: Sent = ("all_to_all", 1, lambda ranks: (ranks - 1) / ranks)
SENT: dict[str, Sent] = {
    "broadcast": ("broadcast", 0, lambda ranks: (ranks - 1) / ranks),
    "reduce": ("reduce", 0, lambda ranks: (ranks - 1) / ranks),
    "send": ("send", 0, lambda ranks: 1),
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "allgather": _GATHER,
    "allgather_coalesced": _GATHER,
    "allgather_into_tensor_coalesced": _GATHER,
    "all_gather_single": _GATHER,
    "all_gather_single_coalesced": _GATHER,
    "_allgather_base": _GATHER,
    "reduce_scatter": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_single_coalesced": _SCATTER,
    "reduce_scatter_tensor_coalesced": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "alltoall": _EXCHANGE,
    "alltoall_base": _EXCHANGE,
    "all_to_all_single": _EXCHANGE,
}
"""Method of torch's ProcessGroup -> (the operation's name, which argument has the bytes, and number
of ranks -> what part of them is sent)."""


class AfterImport(MetaPathFinder):
    """Calls a function with a module right after its first import."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_then_hook(module: Any) -> None:
            load(module)
            hook(module)

        spec.loader.exec_module = load_then_hook  # type: ignore[method-assign]
        return spec


def count_calls(group: Any, calls: list[tuple[float, str, float]]) -> None:
    """Wrap the methods of a process-group class: (time in s, operation, bytes) per call."""

    def counting(method: Callable[..., Any], sent: Sent) -> Callable[..., Any]:
        operation, which, share = sent

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Older names take their tensors by keyword; positions are the same.
            size = _bytes((args or (*kwargs.values(),))[which])
            calls.append((time.time(), operation, float(share(self.size()) * size)))
            return method(self, *args, **kwargs)

        return call

    for name, sent in SENT.items():
        if hasattr(group, name):
            setattr(group, name, counting(getattr(group, name), sent))


_SEEN = [0]
"""The device's peak so far: a loop may begin a new one at each step."""


def device_memory() -> int | None:
    """Most bytes that the device's allocator held for this process; None without such a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    _SEEN[0] = max(int(torch.cuda.max_memory_allocated()), _SEEN[0])
    return _SEEN[0]


def _at_the_end(write: Callable[[], None]) -> None:
    """Call it when this process ends. Ranks of anygauge end by `os._exit`, as forks do."""
    process, usual = os.getpid(), os._exit

    def end(status: int) -> NoReturn:
        if os.getpid() == process:
            write()
        usual(status)

    atexit.register(write)
    os._exit = end


def _main() -> None:
    # multiprocessing's resource tracker inherits a rank's variables, and ends after it.
    tracker = "multiprocessing.resource_tracker import main" in " ".join(sys.orig_argv)
    if TRACE not in os.environ or "RANK" not in os.environ or tracker:
        return
    from benchmark_watch import Phases, StepWatch, count_steps, peak

    folder, rank = Path(os.environ[TRACE]), os.environ["RANK"]
    calls: list[tuple[float, str, float]] = []
    hooks = {"torch.distributed.distributed_c10d": lambda m: count_calls(m.ProcessGroup, calls)}
    after = [lambda module: module.register_optimizer_step_post_hook(lambda *_: device_memory())]
    taken: dict[str, Callable[[], Any]] = {
        "traffic": lambda: {
            **{"peak_memory": device_memory() or peak(), "calls": calls},
            **{"cpu_seconds": time.process_time(), "modules": len(sys.modules)},
        }
    }
    if WATCH in os.environ:
        watch = StepWatch(
            folder / f"watched-rank{rank}.json", *map(int, os.environ[WATCH].split(":"))
        )
        autograd = "torch.autograd"
        after.append(lambda module: count_steps(sys.modules[autograd], module, watch.after))
    if PHASES in os.environ:
        phases = Phases()
        hooks |= phases.hooks()
        taken["phases"] = phases.taken

    def write() -> None:
        for name, take in taken.items():
            text = json.dumps(take())
            (folder / f"{name}-rank{rank}.json").write_text(text, encoding="utf-8")

    _at_the_end(write)
    hooks["torch.optim.optimizer"] = lambda module: [each(module) for each in after]
    sys.meta_path.insert(0, AfterImport(hooks))


def _next() -> None:
    """Run what this file hides: the next one of its name on the path."""
    folders = [Path(path or ".").resolve() for path in sys.path]
    own = Path(__file__).resolve().parent
    rest = sys.path[folders.index(own) + 1 :] if own in folders else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Once in a process: what this file hides may run the first one of its name on the path in turn.
if not hasattr(sys, "anygauge_benchmark"):
    sys.anygauge_benchmark = True  # type: ignore[attr-defined]
    _main()
    _next()
