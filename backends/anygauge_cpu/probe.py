"""What this machine has for the backend: torch, and memory as the kernel counts it. Files only.

Every machine has processors, so the probe looks for torch alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from anygauge.interface import Finding, Probe, UnsupportedError, file_text


def probe() -> Probe:
    """Look, and import nothing."""
    return Probe(
        # Not "yes": a processor is not an accelerator that `--backend auto` should have preferred.
        devices=Finding.not_needed("the host's processors"),
        driver=Finding.not_needed(),
        software=_software(),
        cards=("cpu",),
    )


def _software() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding.no("torch is not installed (pip install torch)", "torch")
    return Finding.yes("torch is installed", "torch")


def this_machine() -> Mapping[str, float]:
    """What the description of the card leaves to the machine at hand."""
    limit = memory_limit()
    return {} if limit is None else {"memory": limit}


def resident_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(bytes resident now, most since the last reset) of this process.

    Raises:
        UnsupportedError: the kernel does not tell.
    """
    path = root / "proc/self/status"
    fields = _fields(path)
    try:
        return _kilobytes(fields["VmRSS"]), _kilobytes(fields["VmHWM"])
    except KeyError as missing:
        raise UnsupportedError(
            f"{path} has no line {missing}: memory of a process is counted on Linux only"
        ) from None


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least of installed memory and the limits of the control groups that we are in."""
    limits = _group_limits(root)
    total = _fields(root / "proc/meminfo").get("MemTotal")
    if total is not None:
        limits.append(_kilobytes(total))
    return min(limits, default=None)


def _group_limits(root: Path) -> list[int]:
    """Limits of our group and all groups above it, in version 2 and version 1 of the interface.

    A lower group may name a higher number than the one above it, so the whole path counts. Inside
    a container the listed path may be the host's, hence every level up to the mount is tried.
    """
    found = []
    for line in file_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            text = file_text(base.joinpath(*parts[:depth]) / name)
            if text.isdigit():
                found.append(int(text))
    return found


def _fields(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in file_text(path).splitlines())
    return {key: value.strip() for key, _, value in lines}


def _kilobytes(value: str) -> int:
    return int(value.split()[0]) * 1024
