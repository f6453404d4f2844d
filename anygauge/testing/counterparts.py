"""Kernels of a device whose formula is another than the reference's, and those that have it too.

Which kernels a run has depends on what is installed where its processes look, so that a process
with the backend's environment answers.
"""

from __future__ import annotations

import json
import os
import sys

from anygauge.kernels.choose import ADAMW, choose_kernels
from anygauge.registry import Registry
from anygauge.testing.process import Subject
from anygauge.testing.watch import answer, answer_of


def counterparts(subject: Subject) -> dict[str, str]:
    """Operation -> the kernel for all devices that updates by the formula of the subject's.

    Raises:
        AssertionError: the process failed; with the end of what it wrote.
    """
    request = {"name": subject.name, "options": dict(subject.options)}
    environment = {**os.environ, **subject.environment}
    found = answer_of(("-m", __name__), request, environment, "the backend's kernels")
    return dict(found)


def of_backend(name: str, options: dict[str, object]) -> dict[str, str]:
    """The same, of what this process finds."""
    registry = Registry.load()
    chosen = choose_kernels(registry, registry.create_backend(name, options), {}).get(ADAMW)
    if chosen is None or chosen.provided is None or not chosen.provided.spec.counterpart:
        return {}
    return {ADAMW: chosen.provided.spec.counterpart}


if __name__ == "__main__":
    answer(of_backend(**json.load(sys.stdin)))
