"""Watches a rank's last steps (how often the host waits, how long the device is busy), and the peak
resident memory of each phase of its run: load, training, evaluation, save.

Loaded by `sitecustomize` in every rank, whoever wrote its loop. A step ends with the first update
of an optimizer after a backward pass. After the measured steps come `count` steps in torch's mode
that warns of each operation for which the host waits (``torch.cuda.set_sync_debug_mode``), then as
many under torch's profiler. What was found is in ``watched-rank{r}.json``:

    host_waits  warnings of a step; null where the device has no such mode
    busy        share of the time in which the device worked (the union of its operations)
    operations  of the device in a step
    problem     why watching ended early; absent where it did not

A phase lasts until the next one begins, so that nothing lies between two; an evaluation within
training goes back to training. The kernel starts a new peak (``VmHWM`` in ``/proc/self/status``)
when 5 is written to ``/proc/self/clear_refs`` (proc(5)). ``phases-rank{r}.json``: phase -> bytes.
"""

from __future__ import annotations

import functools
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

WAITS = "called a synchronizing CUDA operation"
"""Torch's warning (c10/cuda/CUDAFunctions.cpp)."""


def count_steps(autograd: Any, optimizer: Any, after: Callable[[int], None]) -> None:
    """Count the optimizer steps of this process, and call back after each.

    Args:
        autograd, optimizer: torch's modules of these names.
    """
    backward, done, is_new = autograd.backward, 0, False

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_new
        is_new = True
        return backward(*args, **kwargs)

    def updated(*_: Any) -> None:
        nonlocal done, is_new
        # An engine may update its parameters in several calls.
        if is_new:
            is_new, done = False, done + 1
            after(done)

    autograd.backward = counted
    optimizer.register_optimizer_step_post_hook(updated)


class StepWatch:
    """What happens after each step: see the module's text."""

    def __init__(self, path: Any, first: int, count: int) -> None:
        self._path, self._count = path, count
        self._ends = {first, first + count, first + 2 * count}
        self._found: dict[str, Any] = {"steps": count, "host_waits": None}
        self._stages = self._watched()

    def after(self, step: int) -> None:
        """Begin, change over or end; a run is not ended because it cannot be watched."""
        if step not in self._ends or "problem" in self._found:
            return
        try:
            next(self._stages, None)
        except Exception as error:
            self._found["problem"] = f"{type(error).__name__}: {error}"
            self._write()

    def _watched(self) -> Iterator[None]:
        """All of it; between one `yield` and the next are `count` steps."""
        import torch
        from torch.profiler import ProfilerActivity, profile, supported_activities

        on_card, usual = torch.cuda.is_initialized(), warnings.showwarning
        waits = 0

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal waits
            if WAITS in str(message):
                waits += 1
            else:
                usual(message, *args, **kwargs)

        if on_card:
            torch.cuda.set_sync_debug_mode("warn")
            warnings.showwarning = show
            warnings.filterwarnings("always", message=WAITS)
        yield
        if on_card:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = usual
            self._found["host_waits"] = waits / self._count
        # What the host does is slowed down by being watched, and takes seconds to be read.
        device = {ProfilerActivity.CUDA} & supported_activities()
        profiled = profile(activities=list(device or {ProfilerActivity.CPU}))
        profiled.start()
        _synchronize()
        began = time.perf_counter()
        yield
        _synchronize()
        seconds = time.perf_counter() - began
        profiled.stop()
        events = list(profiled.events())
        working = on_device(events) or events  # the host is a device, too
        spans = ((e.time_range.start, e.time_range.end) for e in working)
        self._found["busy"] = min(1.0, union(spans) / 1e6 / seconds)
        self._found["operations"] = len(working) / self._count
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._found), encoding="utf-8")


def on_device(events: Iterable[Any]) -> list[Any]:
    """Those of the device, of a profile's events. A range that somebody named spans time in which
    the device was idle, too."""
    from torch.autograd import DeviceType

    # Not `is`: each access makes a new object.
    return [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length that a number of spans cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


LOAD, TRAINING, EVALUATION, SAVE = "load", "training", "evaluation", "save"


def peak() -> int | None:
    """Most bytes that were resident since the last `reset`; None where the kernel does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


def reset() -> None:
    """Begin a new peak with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Phases:
    """Which phase this process is in, and the peaks so far.

    Args:
        peak, reset: of the memory that is looked at.
    """

    def __init__(
        self, peak: Callable[[], int | None] = peak, reset: Callable[[], None] = reset
    ) -> None:
        self._peak, self._reset = peak, reset
        self._current = LOAD
        self._peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """A phase begins, the one before has ended."""
        self._see()
        self._reset()
        self._current = phase

    def taken(self) -> dict[str, int]:
        """Phase -> its peak in bytes, the current one's included."""
        self._see()
        return dict(self._peaks)

    def _see(self) -> None:
        self._peaks[self._current] = max(self._peak() or 0, self._peaks.get(self._current, 0))

    def at(self, owner: Any, name: str, phase: str) -> None:
        """Have a phase begin with each call of a function."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def beginning(*args: Any, **kwargs: Any) -> Any:
            before = self._current
            self.begin(phase)
            result = call(*args, **kwargs)
            if phase == EVALUATION and before == TRAINING:
                self.begin(before)
            return result

        setattr(owner, name, beginning)

    def hooks(self) -> dict[str, Callable[[Any], None]]:
        """Module -> what to do after its import: anygauge's own, and those of the trainers."""

        def of_trainer(module: Any) -> None:
            self.at(module.Trainer, "evaluate", EVALUATION)
            self.at(module.Trainer, "save_model", SAVE)

        def of_loop(module: Any) -> None:
            self.at(module.Loop, "run", TRAINING)
            self.at(module.Loop, "evaluate", EVALUATION)

        return {
            "anygauge.training.loop": of_loop,
            "anygauge.training.save": lambda module: self.at(module, "save_result", SAVE),
            # A trainer builds its engine in `train`, and then tells its callbacks.
            "transformers.trainer_callback": lambda module: self.at(
                module.CallbackHandler, "on_train_begin", TRAINING
            ),
            "transformers.trainer": of_trainer,
        }
