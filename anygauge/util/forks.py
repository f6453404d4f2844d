"""Whether this process is a fork of one in which torch had threads: it lacks them."""

from __future__ import annotations

import os
import sys

_threads = {"torch had": False, "lacks": False}


def lacks_torch_threads() -> bool:
    """Whether torch may wait for ever here; known where anygauge was imported before the fork."""
    return _threads["lacks"]


def _before() -> None:
    _threads["torch had"] = "torch" in sys.modules and len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208


os.register_at_fork(
    before=_before, after_in_child=lambda: _threads.update(lacks=_threads["torch had"])
)
