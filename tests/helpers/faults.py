"""What tests of faults share: a rank that can be told to fail, and lines for the table of docs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

TOLD_TO_FAIL = """
import signal

def fail(*_):
    raise RuntimeError("told to fail")

signal.signal(signal.SIGRTMIN, fail)
"""
"""A ``sitecustomize``."""


def keep(target: str, fault: str, seconds: Mapping[str, float], said: str) -> None:
    """With ANYGAUGE_FAULTS=FILE, add a line for the table: seconds until nothing was left."""
    file = os.environ.get("ANYGAUGE_FAULTS")
    if file:
        line = {"target": target, "fault": fault, "seconds": dict(seconds), "said": said[:400]}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
