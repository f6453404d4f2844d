"""What the benchmarks of growth share: the resources of a process, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a process uses, as the kernel counts it.

    Attributes:
        cpu_s: processor seconds of its threads so far, those of the kernel for it included.
        memory: resident bytes.
        descriptors: open files and sockets.
    """

    cpu_s: float
    memory: int
    descriptors: int
    threads: int


def usage_of(pid: int | str = "self") -> Usage:
    """What a process of this machine uses now; threads that have ended are not counted.

    Raises:
        OSError: it has ended.
    """
    folder = Path("/proc") / str(pid)
    threads = list((folder / "task").iterdir())
    # Nanoseconds, where `stat` has hundredths of a second.
    cpu = sum(int((one / "schedstat").read_text().split()[0]) for one in threads)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    if "VmRSS" not in status:  # a process that has ended and is not yet waited for
        raise ProcessLookupError(f"process {pid} has ended")
    return Usage(
        cpu_s=cpu / 1e9,
        memory=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=len(list((folder / "fd").iterdir())),
        threads=len(threads),
    )


def growth_table(
    columns: Mapping[str, tuple[str, float, str]], rows: Sequence[Mapping[str, Any]]
) -> str:
    """Markdown.

    Args:
        columns: field of a row -> heading, factor and format of its numbers.
    """
    headings = [heading for heading, _, _ in columns.values()]
    lines = [headings, ["---:"] * len(headings)]
    for row in rows:
        cells = []
        for name, (_, factor, shape) in columns.items():
            value = row.get(name)
            cells.append(value if isinstance(value, str) else _number(value, factor, shape))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(value: float | None, factor: float, shape: str) -> str:
    return "" if value is None else format(value * factor, shape)
