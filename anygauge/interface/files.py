"""Files that are either whole or not there: written to a temporary name, flushed, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | Path, text: str, mode: int = 0o644) -> None:
    """Write a text file in one piece; folders above it are made.

    Raises:
        OSError: the file cannot be written; what was there before is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
