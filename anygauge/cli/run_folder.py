"""The folder of a run: which one it is, and that no other run writes to it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from anygauge.interface import AnygaugeError

RUN_FILE = "run.yaml"
RENDEZVOUS = "rendezvous"
LAUNCHED = "launched.json"
"""Which launcher has the job, and how it finds it again."""
CANCELLED = "cancelled"
"""There since the job of `LAUNCHED` was asked to end."""
_LOCK = ".lock"


def run_folder(wanted: Path, *, resume: bool) -> Path:
    """Where a run writes, absolute.

    Args:
        resume: go on in `wanted` if a run was there before.
    """
    wanted = wanted.absolute()
    return wanted if resume and (wanted / RUN_FILE).is_file() else _free(wanted)


def _free(wanted: Path) -> Path:
    """`wanted`, or the first of ``wanted-2``, ``wanted-3``, ... that is no run's already."""
    number, folder = 1, wanted
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; the kernel ends the claim with this process.

    Raises:
        AnygaugeError: a run is writing to it now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CANCELLED).unlink(missing_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnygaugeError(
                f"a run is writing to {folder} now; wait for its end, or give this one another "
                "'name' or --output"
            ) from None
        # Where ranks of an earlier part of the run met: they would take each other for alive.
        (folder / RENDEZVOUS).unlink(missing_ok=True)
        yield
