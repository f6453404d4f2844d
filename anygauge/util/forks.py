"""Whether this process is a fork of one that had threads beside torch.

Their locks and pools are in the fork, the threads are not: torch may wait for them for ever.
"""

from __future__ import annotations

import os
import sys

_had_threads = False
_lacks_threads = False


def lacks_torch_threads() -> bool:
    """Whether it is; known where anygauge was imported before the fork."""
    return _lacks_threads


def _before() -> None:
    global _had_threads
    _had_threads = "torch" in sys.modules and len(list(os.scandir("/proc/self/task"))) > 1


def _in_child() -> None:
    global _lacks_threads
    _lacks_threads = _lacks_threads or _had_threads


os.register_at_fork(before=_before, after_in_child=_in_child)
