"""Keeps descriptors open until other processes of this machine have ended, even without this one.

A program that leads to other machines may close what it inherits, as ssh does first of all. So a
small process has the descriptors, and waits for such programs; it has nothing else to do.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

_KEEPER = """\
import select, sys
ends = {int(number) for number in sys.argv[1:]}
waiting = select.poll()
for end in ends:
    waiting.register(end, select.POLLIN)
while ends:
    for end, _ in waiting.poll():
        waiting.unregister(end)
        ends.discard(end)
"""


def keep(held: Sequence[int], processes: Sequence[int]) -> subprocess.Popen[bytes] | None:
    """Keep `held` open until all of `processes` have ended.

    Args:
        processes: ids of children that nobody has waited for.

    Returns:
        The process that does, which ends by itself; None where there is nothing to keep, or the
        kernel has no descriptors of processes (Linux before 5.3).

    Raises:
        OSError: it cannot be started.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for process in processes if held else ():
            try:
                end = os.pidfd_open(process)
            except (AttributeError, OSError):
                return None
            stack.callback(os.close, end)
            ends.append(end)
        if not ends:
            return None
        return subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _KEEPER, *map(str, ends)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(*held, *ends),
            start_new_session=True,
        )
