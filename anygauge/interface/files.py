"""Files that are either whole or not there: written to a temporary name, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it takes the place of `path`.

    Raises:
        OSError: the file cannot be flushed or renamed; what was there before is untouched.
    """
    # Containers that share a folder may number their processes alike.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, mode: int = 0o644) -> None:
    """Write a text file in one piece; folders above it are made.

    Raises:
        OSError: the file cannot be written; what was there before is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(text)


def flush(path: Path) -> None:
    """Wait until a file, or what was made, renamed or removed in a folder, is on disk.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
