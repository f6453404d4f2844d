"""Memory of this process as the kernel counts it: resident bytes, their peak and their limit."""

from __future__ import annotations

from pathlib import Path

from anygauge.interface import UnsupportedError

_RESET_PEAK = "5"
"""Written to clear_refs, resets VmHWM to VmRSS (proc(5), since Linux 4.0)."""


def resident_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(bytes resident now, most since the last reset).

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


def reset_peak(root: Path = Path("/")) -> str | None:
    """Start a new peak from what is resident now; returns why that is impossible, or None."""
    path = root / "proc/self/clear_refs"
    try:
        path.write_text(_RESET_PEAK)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def limit_bytes(root: Path = Path("/")) -> int | None:
    """The least of installed memory and the limits of the control groups that we are in."""
    limits = _cgroup_limits(root)
    total = _fields(root / "proc/meminfo").get("MemTotal")
    if total is not None:
        limits.append(_kilobytes(total))
    return min(limits, default=None)


def _cgroup_limits(root: Path) -> list[int]:
    """Limits of our group and all groups above it, in version 2 and version 1 of the interface.

    A lower group may name a higher number than the one above it, so the whole path counts. Inside
    a container the listed path may be the host's, hence every level up to the mount is tried.
    """
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            text = _text(base.joinpath(*parts[:depth]) / name).strip()
            if text.isdigit():
                found.append(int(text))
    return found


def _fields(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return {key: value.strip() for key, _, value in lines}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kilobytes(value: str) -> int:
    return int(value.split()[0]) * 1024
