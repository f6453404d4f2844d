"""The checks that `doctor` runs for the host's processors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from anygauge.interface import Check, Outcome, UnsupportedError, installed_version
from anygauge_cpu.placement import hardware_dtypes
from anygauge_cpu.probe import memory_limit, resident_bytes

_GIB = 2**30


def checks(root: Path = Path("/")) -> Sequence[Check]:
    """Look at torch, the collectives library, cores, arithmetic and memory."""
    torch = installed_version("torch")
    return [
        Check.of("torch", torch is not None, torch or "not installed", "pip install torch"),
        _collectives(),
        _cores(),
        _arithmetic(root),
        _memory(root),
    ]


def _collectives() -> Check:
    try:
        from torch.distributed import is_available, is_gloo_available
    except ImportError as error:
        seen = f"torch.distributed cannot be imported: {error}"
        remedy = "install a build of torch with distributed support"
        return Check("collectives", Outcome.FAIL, seen, remedy)
    if is_available() and is_gloo_available():
        return Check("collectives", Outcome.PASS, "gloo is built in")
    remedy = "run one process only, or install a build with gloo"
    return Check.warn("collectives", "this build of torch has no gloo", remedy)


def _cores() -> Check:
    usable, installed = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    seen = f"{usable} of {installed} logical processors may be used"
    remedy = "widen the affinity mask or the container's cpuset, if that was not meant"
    return Check.of("cores", usable >= installed, seen, remedy, Outcome.WARN)


def _arithmetic(root: Path) -> Check:
    emulated = "emulated: 'auto' chooses float32 on this processor"
    seen = "in hardware" if "bfloat16" in hardware_dtypes(root) else emulated
    return Check("bfloat16", Outcome.PASS, seen)


def _memory(root: Path) -> Check:
    limit = memory_limit(root)
    try:
        in_use, _ = resident_bytes(root)
    except UnsupportedError as error:
        return Check("memory", Outcome.SKIP, str(error), "use the backend on Linux")
    total = "an unknown limit" if limit is None else f"{limit / _GIB:.1f} GiB"
    return Check("memory", Outcome.PASS, f"{in_use / _GIB:.1f} GiB in use of {total}")
