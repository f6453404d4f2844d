"""Checks of what a backend leaves behind: output, files, threads, processes, changed settings.

`ProcessState` looks at each step of the backend's life; the checks are asked once it was closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import locale
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

from anygauge.testing.check import check

SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGCHLD")
OF_TORCH = (
    *("get_default_dtype", "get_default_device", "is_grad_enabled", "is_anomaly_enabled"),
    *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
)
GRACE_S = 5.0
"""Seconds that what is about to end gets: threads and processes that were asked to."""
NOT_ITS_OWN = ("multiprocessing.resource_tracker", "torch._inductor", "torch/_inductor")
"""Helper processes of Python and of torch, which no backend can close."""
KINDS = {
    "output": "commands with --json give what no program can read",
    "signals": "a run that is asked to end writes no checkpoint",
    "variables": "processes that start later get other settings",
    "settings": "files land elsewhere, warnings vanish, weights have another type",
    "files": "users find dumps and caches beside their run files",
    "running": "runs end and their threads or processes stay, with the device",
}
LIBC: Any = ctypes.CDLL(None)


class ProcessState:
    """What the steps of a backend's life have changed in this process, which gets a folder to work
    in, and a file for its output, beside the one of its `answers`."""

    def __init__(self, answers: Path, *, opens: bool) -> None:
        self._folder = answers.with_suffix(".folder").absolute()
        self._output = answers.with_suffix(".out").absolute()
        self._adds = {"files"} if opens else {"files", "variables"}  # torch brings its own
        self._changes: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        self._folder.mkdir(exist_ok=True)
        os.chdir(self._folder)
        sys.stdout.flush()
        with self._output.open("ab") as output:
            os.dup2(output.fileno(), 1)
        with contextlib.suppress(AttributeError):  # the parent of orphans, as of helpers
            LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._before = self._workers()
        self._last = self._snapshot()

    def note(self, step: str, *, judged: bool = True) -> None:
        """Compare with how things were at the step before, if what it changed is the backend's."""
        now = self._snapshot()
        for kind in now if judged else ():
            for name in {**self._last[kind], **(now[kind] if kind in self._adds else {})}:
                was, is_ = (each[kind].get(name, "not there") for each in (self._last, now))
                if was != is_:
                    said = f"{step}: {name} was {was!r}, and is {is_!r}"
                    self._changes[kind].setdefault(name, said)
        self._last = now

    def _snapshot(self) -> dict[str, dict[str, Any]]:
        sys.stdout.flush()
        LIBC.fflush(None)  # what C code has printed waits in a buffer of its own
        broad: list[Any] = [f for f in warnings.filters if f[1] is None and f[3] is None]
        root, torch = logging.root, sys.modules.get("torch")
        settings = {
            "the working folder": str(Path.cwd()),
            "the umask": oct(os.umask(os.umask(0o22))),
            "the locale": locale.setlocale(locale.LC_ALL),
            "warnings": [f"{f[0]} {f[2].__name__}" for f in broad if f[2].__module__ == "builtins"],
            "the root logger": (root.level, [type(each).__name__ for each in root.handlers]),
            "how processes are started": multiprocessing.get_start_method(allow_none=True),
            "the host rounds very small numbers to 0": 5e-324 * 1.0 == 0.0,
            "sys.stdout": type(sys.stdout).__qualname__,
            **{f"torch.{name}()": str(getattr(torch, name)()) for name in OF_TORCH if torch},
        }
        return {
            "output": {"what was printed": self._output.read_text("utf-8", "replace")[-80:]},
            "signals": {name: _signal_handler(getattr(signal, name)) for name in SIGNALS},
            "variables": dict(os.environ),
            "settings": settings,
            "files": {str(each): "there" for each in self._folder.rglob("*")},
        }

    def assert_as_it_was(self, kind: str) -> None:
        """Raises: AssertionError: what was left of a kind, or at which step it changed first."""
        found = list(self._changes[kind].values())
        if kind == "running":
            until = time.monotonic() + GRACE_S
            while (found := sorted(self._workers() - self._before)) and time.monotonic() < until:
                time.sleep(0.05)
        assert not found, "; ".join(found[:4])

    def _workers(self) -> set[str]:
        """Threads that keep the process from ending, and processes."""
        found = {f"thread {t.name} ({t.ident})" for t in threading.enumerate() if not t.daemon}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                words = " ".join(child.cmdline())  # none of what has ended and nobody waits for
                if words and not any(each in words for each in NOT_ITS_OWN):
                    found.add(f"process {child.pid}: {words[:80]}")
        return found


def _signal_handler(number: signal.Signals) -> tuple[str, str, bool]:
    """How a signal is handled by Python, and by C code without Python's knowledge; if blocked."""
    action = (ctypes.c_void_p * 64)()
    LIBC.sigaction(int(number), None, action)
    blocked = number in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return str(signal.getsignal(number)), hex(action[0] or 0), blocked


for _part, _when in {
    "basic": "imported, probed and asked, it leaves",
    "device": "opened and closed, it leaves",
    "ranks": "in a group of ranks, it leaves",
}.items():
    for _kind, _seen in KINDS.items():
        _asked: Any = functools.partial(ProcessState.assert_as_it_was, kind=_kind)
        _asked.__name__ = f"{_part}_leaves_{_kind}"
        _means = f"{_seen}; a vendor's library sets up the process as if it were its own"
        check(f"{_when} {_kind} as it was", part=_part, of_the_close=True, means=_means)(_asked)


@check(
    "closing leaves no process group",
    part="ranks",
    of_the_close=True,
    means="a second run in one process cannot make its groups; `close` overrides that of the core",
)
def leaves_no_group(state: ProcessState) -> None:
    import torch.distributed as dist

    assert not dist.is_initialized(), "torch.distributed is still initialized"
