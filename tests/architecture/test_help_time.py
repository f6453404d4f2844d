"""`anygauge --help` answers at once.

The one test about time: that help costs little *is* the requirement. It counts processor time of
the child, not time on the clock, so that a busy machine does not fail it; the best of five runs.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

LIMIT_S = 0.3
RUNS = 5
ANYGAUGE = Path(sysconfig.get_path("scripts")) / "anygauge"


def processor_time(*arguments: str) -> float:
    """User and system time of one run, in seconds."""
    # Whoever forbids Python to keep compiled files has it compile the same sources in every run.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen([ANYGAUGE, *arguments], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_costs_little_processor_time():
    times = [processor_time("--help") for _ in range(RUNS)]
    assert min(times) < LIMIT_S, f"seconds of each run: {times}"
