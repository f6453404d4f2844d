"""The checks that `doctor` runs for the host's processors."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

from anygauge.interface import Check, Outcome, UnsupportedError
from anygauge_cpu import memory
from anygauge_cpu.placement import hardware_dtypes

_GIB = 2**30


def checks(root: Path = Path("/")) -> Sequence[Check]:
    """Look at torch, the collectives library, cores, arithmetic and memory."""
    return [_torch(), _collectives(), _cores(), _arithmetic(root), _memory(root)]


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name="torch", outcome=Outcome.FAIL, seen="not installed", remedy="pip install torch"
        )
    return Check(name="torch", outcome=Outcome.PASS, seen=version)


def _collectives() -> Check:
    try:
        from torch.distributed import is_available, is_gloo_available
    except ImportError as error:
        return Check(
            name="collectives",
            outcome=Outcome.FAIL,
            seen=f"torch.distributed cannot be imported: {error}",
            remedy="install a build of torch with distributed support",
        )
    if is_available() and is_gloo_available():
        return Check(name="collectives", outcome=Outcome.PASS, seen="gloo is built in")
    return Check(
        name="collectives",
        outcome=Outcome.WARN,
        seen="this build of torch has no gloo",
        remedy="run one process only, or install a build with gloo",
    )


def _cores() -> Check:
    usable, installed = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    seen = f"{usable} of {installed} logical processors may be used"
    if usable >= installed:
        return Check(name="cores", outcome=Outcome.PASS, seen=seen)
    return Check(
        name="cores",
        outcome=Outcome.WARN,
        seen=seen,
        remedy="widen the affinity mask or the container's cpuset, if that was not meant",
    )


def _arithmetic(root: Path) -> Check:
    if "bfloat16" in hardware_dtypes(root):
        return Check(name="bfloat16", outcome=Outcome.PASS, seen="in hardware")
    return Check(
        name="bfloat16",
        outcome=Outcome.PASS,
        seen="emulated: 'auto' chooses float32 on this processor",
    )


def _memory(root: Path) -> Check:
    limit = memory.limit_bytes(root)
    try:
        in_use, _ = memory.resident_bytes(root)
    except UnsupportedError as error:
        return Check(
            name="memory", outcome=Outcome.SKIP, seen=str(error), remedy="use the backend on Linux"
        )
    total = "an unknown limit" if limit is None else f"{limit / _GIB:.1f} GiB"
    return Check(
        name="memory", outcome=Outcome.PASS, seen=f"{in_use / _GIB:.1f} GiB in use of {total}"
    )
