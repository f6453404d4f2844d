"""Kernels of a device whose formula is another than the reference's, and those that have it too.

Which kernels a run has depends on what is installed where its processes look, so that a process
with the backend's environment answers: ``python -m anygauge.testing.counterparts`` reads name and
options of a backend from standard input as JSON, and prints operation -> kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from anygauge.kernels.choose import ADAMW, choose_kernels
from anygauge.registry import Registry
from anygauge.testing.process import Subject

TIMEOUT_S = 120.0


def counterparts(subject: Subject) -> dict[str, str]:
    """Operation -> the kernel for all devices that updates by the formula of the subject's.

    Raises:
        AssertionError: the process failed; with the end of what it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.testing.counterparts"],
        input=json.dumps({"name": subject.name, "options": dict(subject.options)}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **subject.environment},
    )
    said = " | ".join(done.stderr.strip().splitlines()[-3:])
    assert not done.returncode, f"asking for the backend's kernels failed: {said}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def of_backend(name: str, options: dict[str, object]) -> dict[str, str]:
    """The same, of what this process finds."""
    registry = Registry.load()
    chosen = choose_kernels(registry, registry.create_backend(name, options), {}).get(ADAMW)
    if chosen is None or chosen.provided is None or not chosen.provided.spec.counterpart:
        return {}
    return {ADAMW: chosen.provided.spec.counterpart}


if __name__ == "__main__":
    print(json.dumps(of_backend(**json.loads(sys.stdin.read()))))
