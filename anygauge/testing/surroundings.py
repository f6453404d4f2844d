"""What a backend finds in its process and must leave alone: signals, variables, threads, files.

A process of the kit has a folder of its own to work in and a file of its own as standard output.
`Course` notes all of it at each step of the backend's life, so that a change has a step that made
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import HOST_DEVICE, Backend

START, ANNOUNCED, OPENED, USED, CLOSED = "start", "announced", "opened", "used", "closed"
"""Steps of a process, in their order."""
SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGCHLD")
GRACE_S = 5.0
"""Seconds that what is about to end gets: threads and processes that were asked to."""
NOT_ITS_OWN = ("multiprocessing.resource_tracker", "torch._inductor", "torch/_inductor")
"""Helper processes of Python and of torch, which no backend can close."""
BROAD = (Warning, UserWarning, FutureWarning, DeprecationWarning, RuntimeWarning)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What was so at one step; each mapping is by what it is, in words.

    Attributes:
        signals: how each of `SIGNALS` is handled.
        process: what the whole process shares.
        torch: settings of torch; empty where it is not imported.
        placed: processors, threads and priority of the process.
        environ: its variables.
        printed: what stands on standard output.
        files: names in the working folder.
    """

    signals: Mapping[str, Any]
    process: Mapping[str, Any]
    torch: Mapping[str, Any]
    placed: Mapping[str, Any]
    environ: Mapping[str, str]
    printed: str
    files: frozenset[str]


class Course:
    """The steps of one process.

    Args:
        folder: becomes the working folder.
        output: becomes standard output.

    Attributes:
        fresh: another backend like the one under test; None before the first was made.
    """

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self._output = folder.absolute(), output.absolute()
        self.fresh: Callable[[], Backend] | None = None
        self.notes: dict[str, Surroundings] = {}
        self.folder.mkdir(exist_ok=True)
        os.chdir(self.folder)
        sys.stdout.flush()
        number = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(number, 1)
        os.close(number)
        _adopt_orphans()
        self._children = helpers()
        self._threads = frozenset(threading.enumerate())
        self.note(START)

    def note(self, step: str) -> Surroundings:
        """Remember how things are now."""
        self.notes[step] = found = Surroundings(
            signals=_signals(),
            process=_process(),
            torch=_torch(),
            placed=_placed(),
            environ=dict(os.environ),
            printed=self._printed(),
            files=frozenset(str(path.relative_to(self.folder)) for path in self.folder.rglob("*")),
        )
        return found

    def threads_left(self) -> list[str]:
        """Threads that keep the process from ending, and were not there at the start."""
        return _gone(
            lambda: [
                thread.name
                for thread in threading.enumerate()
                if not thread.daemon and thread not in self._threads
            ]
        )

    def helpers_left(self) -> list[str]:
        """Processes that this one, or a process of its, has started and that still run."""
        return _gone(
            lambda: [
                words
                for pid, words in helpers().items()
                if pid not in self._children and not any(each in words for each in NOT_ITS_OWN)
            ]
        )

    def _printed(self) -> str:
        sys.stdout.flush()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)  # what C code has printed waits in a buffer of its own
        return self._output.read_text(encoding="utf-8", errors="replace")


def changed(
    before: Mapping[str, Any], after: Mapping[str, Any], *, more: bool = False
) -> list[str]:
    """What differs, in words.

    Args:
        more: further names are not a difference.
    """
    names = [*before, *(() if more else (name for name in after if name not in before))]
    return [
        f"{name} was {before.get(name, 'not there')}, and is {after.get(name, 'not there')}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def entries(folder: str) -> int:
    """How many names a folder has."""
    return len(list(Path(folder).iterdir()))


def helpers() -> dict[int, str]:
    """Children of this process that run: their number -> command line. Empty but on Linux."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                words = path.with_name("cmdline").read_bytes().replace(b"\0", b" ")
                found[int(path.parent.name)] = words.decode(errors="replace").strip()
    return found


def _gone(left: Callable[[], list[str]]) -> list[str]:
    """What is left once it has had its time to go."""
    until = time.monotonic() + GRACE_S
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    return left()


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, so that `helpers` sees them (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _signals() -> dict[str, Any]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    found: dict[str, Any] = {}
    for name in SIGNALS:
        number = getattr(signal, name)
        handler = signal.getsignal(number)
        words = getattr(handler, "__qualname__", None) or getattr(handler, "name", str(handler))
        found[f"the handler of {name}"] = f"{words} (at {_handler_address(number):#x})"
        found[f"{name} blocked"] = number in blocked
    return found


def _handler_address(number: int) -> int:
    """The address of the handler, which C code may have set without Python's knowledge."""
    action = (ctypes.c_void_p * 64)()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).sigaction(int(number), None, action)
    return action[0] or 0


def _process() -> dict[str, Any]:
    umask = os.umask(0o22)
    os.umask(umask)
    root = logging.getLogger()
    return {
        "the working folder": str(Path.cwd()),
        "the umask": oct(umask),
        "the locale": locale.setlocale(locale.LC_ALL),
        "warnings that are hidden or raised": _broad_filters(),
        "handlers of the root logger": [type(handler).__name__ for handler in root.handlers],
        "the level of the root logger": root.level,
        "sys.excepthook": sys.excepthook,
        "how processes are started": multiprocessing.get_start_method(allow_none=True),
        "the host rounds very small numbers to 0": 5e-324 * 1.0 == 0.0,
        "sys.stdout": type(sys.stdout).__qualname__,
    }


def _broad_filters() -> list[str]:
    """Filters that concern the warnings of all modules."""
    return [
        f"{action} {category.__name__}"
        for action, message, category, module, _ in warnings.filters
        if message is None and module is None and category in BROAD
    ]


def _torch() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "torch's default type": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch's anomaly detection": torch.is_anomaly_enabled(),
        "autocast on the host": torch.is_autocast_enabled(HOST_DEVICE),
    }


def _placed() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    return {
        "its processors": sorted(os.sched_getaffinity(0)),
        "its priority": os.getpriority(os.PRIO_PROCESS, 0),
        **({} if torch is None else {"torch's number of threads": torch.get_num_threads()}),
    }
