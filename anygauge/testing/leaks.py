"""Checks of what a backend leaves behind: output, files, threads, processes, changed settings.

A process of the kit has a folder of its own to work in and a file of its own as standard output.
`ProcessState` notes all of it at each step of the backend's life, and the checks compare the notes
once the backend was closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Backend
from anygauge.testing.check import CHECKS, check

START, ANNOUNCED, OPENED, USED, CLOSED = "start", "announced", "opened", "used", "closed"
SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGCHLD")
OF_TORCH = (
    *("get_default_dtype", "get_default_device", "is_grad_enabled", "is_anomaly_enabled"),
    *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
)
GRACE_S = 5.0
"""Seconds that what is about to end gets: threads and processes that were asked to."""
NOT_ITS_OWN = ("multiprocessing.resource_tracker", "torch._inductor", "torch/_inductor")
"""Helper processes of Python and of torch, which no backend can close."""
FIRST, MORE, MIB = 3, 6, 2**20
"""Openings after which it is counted what they take, those that must not add any, and a unit."""
KINDS: Mapping[str, tuple[str, str]] = {
    "output": ("standard output", "commands with --json give what no program can read"),
    "signals": ("the handlers of signals", "a run that is asked to end writes no checkpoint"),
    "variables": ("variables that were set", "processes that start later get other settings"),
    "settings": (
        "folder, umask, locale, warnings, logging, number formats and torch's settings",
        "files land elsewhere, warnings vanish, weights have another type",
    ),
    "processors": ("processors, threads and priority", "what the process does next is slow"),
    "files": ("files of the working folder", "users find dumps and caches beside their run files"),
    "running": ("threads and processes", "runs end and their processes stay, with the device"),
}
STEPS = {
    START: "",
    ANNOUNCED: "importing it",
    OPENED: "importing and opening it",
    CLOSED: "closing",
}


class ProcessState:
    """The steps of one process.

    Attributes:
        fresh: another backend like the one under test; None before the first was made.
        notes: what was so at each step, by kind.
    """

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self._output = folder.absolute(), output.absolute()
        self.fresh: Callable[[], Backend] | None = None
        self.notes: dict[str, dict[str, dict[str, Any]]] = {}
        self.folder.mkdir(exist_ok=True)
        os.chdir(self.folder)
        sys.stdout.flush()
        number = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(number, 1)
        os.close(number)
        with contextlib.suppress(OSError, AttributeError):  # the parent of orphans, as of helpers
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._before = set(self._running())
        self.note(START)

    def note(self, step: str) -> None:
        """Remember how things are now."""
        sys.stdout.flush()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)  # what C code has printed waits in a buffer of its own
        printed = self._output.read_text(encoding="utf-8", errors="replace")
        self.notes[step] = {
            "output": {"what was printed": printed[-80:]},
            "signals": _signals(),
            "variables": dict(os.environ),
            "settings": _settings(sys.modules.get("torch")),
            "processors": _processors(sys.modules.get("torch")),
            "files": {str(each): "there" for each in self.folder.rglob("*")},
        }

    def changes(self, kind: str) -> list[str]:
        """What its steps have changed, in words: each once, at the first step that did."""
        pairs, closed = list(pairwise(self.notes)), USED in self.notes
        if closed:
            # Opening may bind the process, and closing gives it back.
            pairs = [(START, CLOSED)] if kind == "processors" else [(START, OPENED), (USED, CLOSED)]
        more = kind in ("settings", "processors") or (kind == "variables" and closed)
        found: dict[str, str] = {}
        for first, second in pairs:
            before, after = (self.notes[step][kind] for step in (first, second))
            for name in [*before, *(() if more else after)]:
                values = [each.get(name, "not there") for each in (before, after)]
                if values[0] != values[1]:
                    title = f"asking whether {CHECKS[second].title}" if second in CHECKS else second
                    step = STEPS.get(second) or title
                    told = f"{step}: {name} was {values[0]!r}, and is {values[1]!r}"
                    found.setdefault(name, told)
        return list(found.values())

    def left_running(self) -> list[str]:
        """Threads that keep the process from ending and processes, in words, once they had time."""
        until = time.monotonic() + GRACE_S
        while set(self._running()) - self._before and time.monotonic() < until:
            time.sleep(0.05)
        return sorted(set(self._running()) - self._before)

    def _running(self) -> list[str]:
        found = [f"thread {t.name} ({t.ident})" for t in threading.enumerate() if not t.daemon]
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
                words = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
                mine = int(parent) == os.getpid() and state != "Z"
                if mine and not any(each in words for each in NOT_ITS_OWN):
                    found.append(f"process {path.parent.name}: {words[:80]}")
        return found


def _signals() -> dict[str, Any]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    found: dict[str, Any] = {}
    for name in SIGNALS:
        number = getattr(signal, name)
        action = (ctypes.c_void_p * 64)()  # C code may have set it without Python's knowledge
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).sigaction(int(number), None, action)
        found[name] = (str(signal.getsignal(number)), hex(action[0] or 0), number in blocked)
    return found


def _settings(torch: Any) -> dict[str, Any]:
    umask = os.umask(0o22)
    os.umask(umask)
    broad: list[Any] = [each for each in warnings.filters if each[1] is None and each[3] is None]
    found: dict[str, Any] = {
        "the working folder": str(Path.cwd()),
        "the umask": oct(umask),
        "the locale": locale.setlocale(locale.LC_ALL),
        "warnings": [f"{f[0]} {f[2].__name__}" for f in broad if f[2].__module__ == "builtins"],
        "the root logger": (logging.root.level, [type(h).__name__ for h in logging.root.handlers]),
        "how processes are started": multiprocessing.get_start_method(allow_none=True),
        "the host rounds very small numbers to 0": 5e-324 * 1.0 == 0.0,
        "sys.stdout": type(sys.stdout).__qualname__,
    }
    for name in OF_TORCH if torch is not None else ():
        found[f"torch.{name}()"] = str(getattr(torch, name)())
    return found


def _processors(torch: Any) -> dict[str, Any]:
    found = {"processors": os.sched_getaffinity(0), "priority": os.getpriority(os.PRIO_PROCESS, 0)}
    return found | ({} if torch is None else {"torch's threads": torch.get_num_threads()})


def _register(part: str, kind: str) -> None:
    def asked(state: ProcessState) -> None:
        found = state.left_running() if kind == "running" else state.changes(kind)
        assert not found, "; ".join(found[:4])

    what, means = KINDS[kind]
    when = {"basic": "imported, probed and asked", "device": "opened and closed"}
    asked.__name__ = f"{part}_leaves_{kind}"
    check(
        f"{when.get(part, 'in a group of ranks')}, it leaves {what} alone",
        part=part,
        of_the_close=True,
        means=f"{means}; a vendor's library sets up the process as if it were its own",
    )(asked)


for _part in ("basic", "device", "ranks"):
    for _kind in KINDS:
        _register(_part, _kind)


@check(
    "opening and closing again and again takes no more descriptors, threads and memory",
    part="device",
    of_the_close=True,
    means="long processes that open devices run out of descriptors; `close` forgets what `open` "
    "has made",
    limit_s=120,
)
def opens_again_and_again(state: ProcessState) -> None:
    assert state.fresh is not None
    counts = []
    for _ in range(FIRST + MORE):
        backend = state.fresh()
        try:
            backend.open(0)
        except AnygaugeError as error:
            raise AssertionError(f"it cannot be opened after it was closed: {error}") from error
        backend.close()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        of = [len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("fd", "task")]
        counts.append((*of, pages * resource.getpagesize() // MIB))
    names = ("descriptors", "threads", "MiB of memory")
    for what, numbers in zip(names, zip(*counts, strict=True), strict=True):
        steady = numbers[FIRST - 1 :]
        # Caches may add a few now and then; what is forgotten adds some each time.
        growing = all(after > before for before, after in pairwise(steady))
        assert not growing, f"{what} grow with each opening: {', '.join(map(str, steady))}"


@check(
    "closing leaves no process group",
    part="ranks",
    of_the_close=True,
    means="a second run in one process cannot make its groups; `close` overrides that of the core",
)
def leaves_no_group(state: ProcessState) -> None:
    import torch.distributed as dist

    assert not dist.is_initialized(), "torch.distributed is still initialised"
