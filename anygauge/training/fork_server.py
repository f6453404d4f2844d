"""The process that the ranks of a node are forked from: it has imported what each of them needs.

Imports are most of a small run's start, and of the memory of a rank that holds a small part. Here
they are done once for a node, and ranks share the pages. The agent starts this process as
``python -m anygauge.training.worker --fork-server DESCRIPTOR``, and asks it for each rank.

A fork has the thread that forks, and no other. So this process starts none and opens no device; if
a library does, it refuses, and the agent starts ranks as processes of their own. A rank is the
agent's own child afterwards: it is forked twice, and the process in between ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from anygauge.util.events import EVENTS_FD
from anygauge.util.forking import receive, send
from anygauge.util.imports import uncollected
from anygauge.util.processes import end_process, tie_to_parent
from anygauge.util.rendezvous import STORE_FD

PLAIN = ("anygauge.config.resolved", "anygauge.registry", "sympy", "jinja2", "filelock", "PIL")
"""Modules that ranks import anyway, and that read no variable which an agent decides: they are
imported while the environment is not known yet."""
DRAFTS = "sklearn"
"""transformers before 5 imports it for texts that a smaller model drafts; with it come pandas and
pyarrow, which starts a thread. If a run needs it after all, its ranks are started one by one."""

_ADOPTION_S = 10.0
_PAUSE_S = 0.0005
_MEMORY_DEVICES = 1  # major number of /dev/null, /dev/zero, /dev/urandom: devices.txt of Linux


def serve(descriptor: int, rank: Callable[[], int | None]) -> NoReturn:
    """Import, and fork a rank for each request; end with the agent, or when it has no more.

    Args:
        descriptor: of the socket that leads to the agent.
        rank: what each rank does, with its arguments in `sys.argv`; returns its exit status.
    """
    channel = socket.socket(fileno=descriptor)
    with uncollected():
        for name in PLAIN:
            with contextlib.suppress(ImportError):  # torch or a model need it, or nobody does
                importlib.import_module(name)
    given: dict[str, str] = {}
    while (received := receive(channel)) is not None:
        message, descriptors = received
        if "prepare" in message:
            given = message["prepare"]["environment"]
            why_not = _prepared(message["prepare"])
            with contextlib.suppress(OSError):
                send(channel, {"refused": why_not} if why_not else {"ready": True})
            continue
        arguments = _forked(message["fork"], descriptors, channel, given)
        if arguments is not None:
            sys.argv[1:] = arguments
            # To take down what was imported would copy all pages that ranks share.
            end_process(_status_of(rank))
    os._exit(0)  # what libraries do at exit belongs to ranks


def _status_of(rank: Callable[[], int | None]) -> int:
    try:
        return rank() or 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


def _prepared(order: Mapping[str, Any]) -> str:
    """Import in the environment of the ranks; returns why not to fork this process, or ""."""
    try:
        os.environ.clear()
        os.environ.update(order["environment"])
        preload(order["run"], order["backend"], order["options"])
    except BaseException as error:  # a rank of its own will report what is wrong, in its own words
        return f"{type(error).__name__}: {error}"
    return why_not_forked()


def preload(text: str, backend_name: str, options: Mapping[str, Any]) -> None:
    """Import what a rank imports until its first step, and nothing that its run does not use.

    Args:
        text: the resolved run.
    """
    from anygauge.config.resolved import parse_run
    from anygauge.registry import Registry
    from anygauge.util.imports import quick_imports, unused

    run = parse_run(text)
    with (
        quick_imports([*unused(few_bits=run.has_few_bits, trackers=run.trackers), DRAFTS]),
        uncollected(),
    ):
        import anygauge.training.save
        import anygauge.training.setup  # noqa: F401
        from anygauge.models.factory import import_architecture
        from anygauge.training.strategy import create_strategy

        registry = Registry.load()
        create_strategy(registry, run)
        spec = registry.find_strategy(run.strategy.name).spec
        if spec.load is not None:
            spec.load(registry.create_backend(backend_name, options))
        import_architecture(run.model)
        if run.adapter is not None:
            import peft  # noqa: F401


def why_not_forked() -> str:
    """Why this process must not be forked; empty if it may be."""
    try:
        if len(_threads()) > 1:
            _end_threads_that_mind_forks()
        threads = _threads()
        devices = sorted(filter(_is_device, Path("/proc/self/fd").iterdir()))
    except OSError as error:
        return f"its threads cannot be counted: {error}"
    if len(threads) != 1:
        return f"libraries started threads: {', '.join(threads)}"
    if devices:
        return f"libraries opened devices: {', '.join(str(each.readlink()) for each in devices)}"
    return ""


def _threads() -> list[str]:
    """Names of all threads of this process, those of libraries included."""
    return [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]


def _end_threads_that_mind_forks() -> None:
    """Fork for nothing: OpenBLAS ends its threads before a fork, and makes them again when they are
    needed (blas_thread_shutdown, registered with pthread_atfork)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of the threads
        pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _is_device(descriptor: Path) -> bool:
    try:
        found = descriptor.stat()
    except OSError:  # that of the folder itself, which is closed again
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) != _MEMORY_DEVICES


def _forked(
    order: Mapping[str, Any],
    descriptors: Sequence[int],
    channel: socket.socket,
    given: Mapping[str, str],
) -> list[str] | None:
    """Fork a rank; returns its arguments there, and None here."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # the agent sees that nobody answers
        if middle := os.fork():
            os.waitpid(middle, 0)
        else:
            try:
                if os.fork():
                    os._exit(0)
                channel.close()
                return _become(order, descriptors, given)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    for each in descriptors:
        os.close(each)
    return None


def _become(
    order: Mapping[str, Any], descriptors: Sequence[int], given: Mapping[str, str]
) -> list[str]:
    """Have this process be a rank, as one that its agent had started itself.

    Args:
        descriptors: for its log, its events and the answer to the agent; and the socket of the
            ranks' store, if it is to have that.
    """
    os.setsid()
    log, events, answer, *listener = descriptors
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != order["agent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(_PAUSE_S)
    tie_to_parent(signal.SIGKILL, order["agent"])
    # Imports may have set and removed variables, as they would have in the rank.
    changed = {name: text for name, text in os.environ.items() if given.get(name) != text}
    kept = {
        n: text for n, text in order["environment"].items() if n in os.environ or n not in given
    }
    os.environ.clear()
    os.environ.update(kept | changed)
    os.environ[EVENTS_FD] = str(events)
    for each in listener:
        os.environ[STORE_FD] = str(each)
    # `ps -o comm` and `top`: the arguments that they show are those of the server.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank{os.environ['RANK']}")
    printed = os.pread(1, os.fstat(1).st_size, 0)  # what the imports printed
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.write(1, printed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python and torch do so themselves
    with socket.socket(fileno=answer) as channel:
        send(channel, {"pid": os.getpid()})
        if receive(channel) is None:
            os._exit(1)  # its agent has given up
    return list(order["arguments"])
