"""Checks of what a backend leaves behind: output, files, threads, processes, changed settings.

A process of the kit has a folder of its own to work in and a file of its own as standard output.
`ProcessState` looks at all of it at each step of the backend's life; the checks are asked once the
backend was closed.
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
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
KINDS: Mapping[str, str] = {
    "output": "commands with --json give what no program can read",
    "signals": "a run that is asked to end writes no checkpoint",
    "variables": "processes that start later get other settings",
    "settings": "files land elsewhere, warnings vanish, weights have another type",
    "files": "users find dumps and caches beside their run files",
    "running": "runs end and their threads or processes stay, with the device",
}
LIBC: Any = ctypes.CDLL(None)


class ProcessState:
    """What the steps of a backend's life have changed in this process.

    Attributes:
        changes: by kind: what was changed -> in words, at the first step that did.
    """

    def __init__(self, folder: Path, output: Path, *, opens: bool) -> None:
        self.folder, self._output, self._opens = folder.absolute(), output.absolute(), opens
        self.changes: dict[str, dict[str, str]] = defaultdict(dict)
        self.folder.mkdir(exist_ok=True)
        os.chdir(self.folder)
        sys.stdout.flush()
        number = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(number, 1)
        os.close(number)
        with contextlib.suppress(AttributeError):  # the parent of orphans, as of helpers
            LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._running_before = set(self._running())
        self._last = self._look()

    def note(self, step: str, *, judged: bool = True) -> None:
        """Compare with how things were at the step before, if what it changed is the backend's."""
        now = self._look()
        for kind in now if judged else ():
            before = self._last[kind]
            # Torch, which a backend imports, brings settings and variables of its own.
            added = kind == "files" or (kind == "variables" and not self._opens)
            for name in {**before, **(now[kind] if added else {})}:
                values = [each.get(name, "not there") for each in (before, now[kind])]
                if values[0] != values[1]:
                    told = f"{step}: {name} was {values[0]!r}, and is {values[1]!r}"
                    self.changes[kind].setdefault(name, told)
        self._last = now

    def _look(self) -> dict[str, dict[str, Any]]:
        sys.stdout.flush()
        LIBC.fflush(None)  # what C code has printed waits in a buffer of its own
        printed = self._output.read_text(encoding="utf-8", errors="replace")
        return {
            "output": {"what was printed": printed[-80:]},
            "signals": {name: _handler(getattr(signal, name)) for name in SIGNALS},
            "variables": dict(os.environ),
            "settings": _settings(sys.modules.get("torch")),
            "files": {str(each): "there" for each in self.folder.rglob("*")},
        }

    def left(self, kind: str) -> list[str]:
        """What was left of a kind, in words."""
        if kind != "running":
            return list(self.changes[kind].values())
        until = time.monotonic() + GRACE_S
        while set(self._running()) - self._running_before and time.monotonic() < until:
            time.sleep(0.05)
        return sorted(set(self._running()) - self._running_before)

    def _running(self) -> list[str]:
        """Threads that keep the process from ending, and processes."""
        found = [f"thread {t.name} ({t.ident})" for t in threading.enumerate() if not t.daemon]
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
                words = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
                mine = int(parent) == os.getpid() and state != "Z"
                if mine and not any(each in words for each in NOT_ITS_OWN):
                    found.append(f"process {path.parent.name}: {words[:80]}")
        return found


def _handler(number: signal.Signals) -> tuple[str, str, bool]:
    """How a signal is handled: by Python, by C code without Python's knowledge, or blocked."""
    action = (ctypes.c_void_p * 64)()
    LIBC.sigaction(int(number), None, action)
    blocked = number in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return str(signal.getsignal(number)), hex(action[0] or 0), blocked


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


def _register(part: str, kind: str) -> None:
    def asked(state: ProcessState) -> None:
        found = state.left(kind)
        assert not found, "; ".join(found[:4])

    asked.__name__ = f"{part}_leaves_{kind}"
    when = {"basic": "imported, probed and asked", "device": "opened and closed"}
    check(
        f"{when.get(part, 'in a group of ranks')}, it leaves {kind} as it was",
        part=part,
        of_the_close=True,
        means=f"{KINDS[kind]}; a vendor's library sets up the process as if it were its own",
    )(asked)


for _part in ("basic", "device", "ranks"):
    for _kind in KINDS:
        _register(_part, _kind)


@check(
    "closing leaves no process group",
    part="ranks",
    of_the_close=True,
    means="a second run in one process cannot make its groups; `close` overrides that of the core",
)
def leaves_no_group(state: ProcessState) -> None:
    import torch.distributed as dist

    assert not dist.is_initialized(), "torch.distributed is still initialised"
