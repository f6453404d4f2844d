"""Processes that end with the process that started them, even if that one is killed outright.

The chain of a run is: command or agent, ranks, helper processes of a rank. A parent that ends
in an orderly way ends its children itself; `die_with_parent` covers the other ways.

``python -m anygauge.util.processes PROGRAM ...`` runs a program that would not end so by itself,
such as mpirun or kubectl: it receives SIGUSR1 when the process that started it is gone. Open MPI
passes that signal on to the agents, which end their ranks in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

PARENT_PID = "ANYGAUGE_PARENT_PID"
"""Environment variable: process id of the parent that the child must not outlive."""

END_AT_ONCE = signal.SIGUSR2
"""What a supervisor sends to ranks whose peers failed. SIGTERM is a request that a rank answers
when its step is done, and one that waits for a dead peer never would; nothing catches this one."""

REPEATED_SIGNAL_S = 0.5
"""A request to end that follows another so soon is the same one: schedulers deliver it to a step
and to its processes, and programs pass on what a terminal has sent to their children as well."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def parent_environment() -> dict[str, str]:
    """What a parent adds to a child's environment for `die_with_parent` to find.

    The parent is the *thread* that starts the child: start children from a thread that
    lives as long as they should, best the main thread.
    """
    return {PARENT_PID: str(os.getpid())}


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have this process receive `signum` when its parent ends, and at once if it already has.

    Call it first thing in a child, before heavy imports. Without `PARENT_PID` in the environment
    nothing happens; the variable is removed, so that grandchildren do not take it for theirs.
    """
    expected = os.environ.pop(PARENT_PID, None)
    if expected is not None:
        tie_to_parent(signum, int(expected))


def tie_to_parent(signum: int, parent: int | None = None) -> None:
    """See `die_with_parent`.

    Args:
        parent: its process id; None for the one that there is now.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0)
    # The parent may have ended before the request was made: then nothing would ever arrive.
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def end_rank(status: int) -> NoReturn:
    """End this process at once, as a rank does once its report, logs and trackers are closed.

    Python would end it step by step, beside threads of process groups: a module of torch may still
    hold one (as the default of a parameter), and a thread that gives a tensor back while the
    interpreter ends aborts the process. What was printed is written first.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries of C have printed
    os._exit(status)


def describe_exit(code: int) -> str:
    """An exit code as `subprocess` reports it, in words: negative codes are signals."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


if __name__ == "__main__":
    # A signal that arrives before the program has begun must end this process, as it would that.
    die_with_parent(signal.SIGUSR1)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")
