"""The lock of a run's folder: it keeps other runs out, and tells the folder from its namesakes.

If the folder is moved or removed while its run goes on, a run that is started under its name makes
another lock. So ranks know theirs by device and inode, and compare before they write.
"""

from __future__ import annotations

import os
from pathlib import Path

from anygauge.util.errors import AnygaugeError

LOCK = ".lock"


def open_lock(folder: Path) -> int:
    """Open the lock of a folder; both are made if they are not there. Nothing is written to it.

    While it is open, no other file gets its inode number.

    Raises:
        AnygaugeError: it cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise AnygaugeError(
            f"{path} cannot be opened: {error.strerror}. This lock keeps two runs out of one "
            "folder: make sure that you can read and write it, or give the run another 'name' or "
            "--output"
        ) from error


def identity_of(lock: int | Path) -> str:
    """``DEVICE:INODE`` of a lock, open or by its path: processes of its machine know it by this.

    Raises:
        OSError: it is not there.
    """
    found = os.stat(lock)  # noqa: PTH116 - also of a descriptor
    return f"{found.st_dev}:{found.st_ino}"


def check_lock(folder: Path, identity: str | None) -> None:
    """Refuse to write to a folder that is not the run's any more.

    Args:
        identity: of the run's lock; None: nothing is compared.

    Raises:
        AnygaugeError: says what has happened to the folder.
    """
    if identity is None:
        return
    what = "moved or removed while the run was going on"
    try:
        if identity_of(folder / LOCK) == identity:
            return
        what += ", and another run was started under its name"
    except OSError as error:
        if folder.is_dir():
            what = f"emptied or replaced: its {LOCK} cannot be read ({error.strerror})"
    raise AnygaugeError(
        f"{folder} is not this run's folder any more: it was {what}. Nothing was written there. "
        "What the run wrote before is where its folder is now; to resume it, move the folder back "
        "under its name and give the same command with --resume auto"
    )
