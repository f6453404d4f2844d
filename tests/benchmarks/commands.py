"""Runs a benchmark's command as its user does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from benchmarks.contender_processes import ROOT


def run(module: str, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m module``, with data of its own."""
    environment = {name: v for name, v in os.environ.items() if name != "ANYGAUGE_DATA"}
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=1800,
        stdin=subprocess.DEVNULL,
        check=False,
    )
