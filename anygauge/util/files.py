"""Files that are either whole or not there: written to a temporary name, flushed, then renamed.

And files that someone else wrote: opened only if they are files, read up to a bound.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any, BinaryIO


def part_of(folder: Path) -> Path:
    """Return where a folder is written before it takes its place; a kill leaves it behind."""
    return folder.with_name(f".{folder.name}.part")


def why_no_folder(path: str | Path) -> str:
    """Why no files can be written to a folder, which need not be there; "" where they can."""
    path = Path(path).absolute()
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a text file in one piece; folders above it are made.

    Args:
        mode: of the file, whatever the mode of one that was there before.

    Raises:
        OSError: the file cannot be written; what was there before is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Containers that share a folder may number their processes alike.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    # What an earlier process has left under this name would keep its own mode.
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_text(path: Path, limit: int) -> str:
    """What a text file of at most `limit` bytes holds; see `read_bounded`.

    A byte order mark, which some editors write, is dropped.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bounded(path, limit).decode("utf-8-sig")


def read_json(path: Path, limit: int = 64 * 2**20, **options: Any) -> Any:
    """What a JSON file of at most `limit` bytes holds; `options` are those of `json.loads`.

    Raises:
        OSError: as of `read_bounded`.
        ValueError: it is not UTF-8 or not JSON, or nested too deeply.
    """
    try:
        return json.loads(read_text(path, limit), **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def usual_mode(folder: Path) -> int:
    """The permissions of a new file in a folder that was made here: what the umask leaves.

    Libraries that write to a temporary file first leave theirs to its owner alone.
    """
    return stat.S_IMODE(folder.stat().st_mode) & 0o666


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device would wait or read for ever.

    Raises:
        OSError: it cannot be opened, or is not a regular file; `strerror` says what it is.
    """
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or socket"
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        return open(descriptor, "rb")  # noqa: PTH123 - a descriptor, and the caller's
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: str | Path, at_most: int) -> bytes:
    """All bytes of a regular file.

    Args:
        at_most: bytes; a longer file is refused, and no more of it than this is read.

    Raises:
        OSError: as of `open_regular`, or the file is longer; `strerror` says what is wrong.
    """
    with open_regular(path) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        shown = f"{at_most / 2**20:g} MiB" if at_most >= 2**20 else f"{at_most:,} bytes"
        raise OSError(errno.EFBIG, f"it is longer than {shown}", str(path))
    return data


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
