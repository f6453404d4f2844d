"""A rank as its agent starts it: ``-m tests.training.ending_rank METRICS ARGUMENTS``, the worker's.

What Python does when a process ends would abort it, and so would a return from the rank. So would
the reader of YAML fail: the command alone reads that. METRICS is ``-``, or the file of its steps:
then it is asked to stop after the first.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path


def ask(metrics: Path) -> None:
    while not (metrics.exists() and metrics.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    metrics = sys.argv.pop(1)
    atexit.register(os.abort)
    for name in ("document", "load"):
        sys.modules[f"anygauge.config.{name}"] = None  # type: ignore[assignment]
    if metrics != "-":
        threading.Thread(target=ask, args=(Path(metrics),), daemon=True).start()
    print("not flushed", end="")
    try:
        runpy.run_module("anygauge.launch.rank", run_name="__main__", alter_sys=True)
    finally:
        os.abort()
