"""Has a function done by a copy of this process, while this one does something else."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from anygauge.util.processes import tie_to_parent

T = TypeVar("T")


class Aside(Generic[T]):
    """A function's result, found meanwhile.

    The copy has all that this process has imported and learned. It must have no threads: autograd
    has some from its first backward on.

    Args:
        function: returns what can be pickled.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._read, write = os.pipe()
        parent = os.getpid()
        self._pid: int = os.fork()
        if self._pid:
            os.close(write)
            return
        status = 1
        try:
            tie_to_parent(signal.SIGKILL, parent)
            os.close(self._read)
            with os.fdopen(write, "wb") as file:
                file.write(pickle.dumps(function()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def result(self) -> T | None:
        """What was found; None: the copy failed."""
        with os.fdopen(self._read, "rb") as file:
            found = file.read()
        _, status = os.waitpid(self._pid, 0)
        return pickle.loads(found) if status == 0 else None

    def drop(self) -> None:
        """End it: nobody asks for its result."""
        os.close(self._read)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def can_be_aside() -> bool:
    """Whether there is a second core, and this process has but one thread."""
    threads = Path("/proc/self/task")
    if not threads.is_dir() or len(list(threads.iterdir())) > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1
