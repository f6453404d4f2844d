"""Text that messages and files share: near names, lists, errors in one line, what a terminal shows,
sizes and times, values as JSON."""

from __future__ import annotations

import difflib
import math
import re
import shutil
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.7) -> str:
    """``"; did you mean 'x'?"`` for the nearest valid name, or nothing where none is near.

    A name of three letters with another letter is another name, not a misspelt one: hence the
    cutoff.
    """
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def near_file(path: Path) -> str:
    """Suggest a file or folder like one that is not there, from what its folder holds."""
    try:
        names = sorted(each.name for each in path.parent.iterdir())
    except OSError:  # its folder is not there, either, or cannot be read
        return ""
    return did_you_mean(path.name, [name for name in names if name != path.name])


def hang_indent(text: str, width: int) -> str:
    """A text wrapped at words, each line under its own indent and two more; words stay whole."""
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def wrap_for_stream(text: str, stream: IO[str]) -> str:
    """A text for a stream: wrapped where that is a terminal, whole lines for all others."""
    return hang_indent(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def flatten_values(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(Dotted path, value) of all that is no mapping."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_values(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def join_names(names: Iterable[str]) -> str:
    """Names in order, or ``none``."""
    return ", ".join(sorted(names)) or "none"


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's message; its type, if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def describe(error: BaseException) -> str:
    """An exception from foreign code in one line: its type, its text and where it was raised."""
    text = " ".join(str(error).split())
    words = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # its own text says where
        return words
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if not frames:
        return words
    return f"{words} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(text: str) -> str:
    r"""A text for a terminal: control characters but for newlines and tabs become ``\x1b`` and the
    like, and so do bytes of a file's name that are not UTF-8."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shorten(text: str) -> str:
    """A text of at most 60 characters for a message: the rest is cut off, with an ellipsis."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def json_values(value: Any) -> Any:
    """Values as JSON has them: inf and nan become null."""
    if isinstance(value, Mapping):
        return {name: json_values(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_bytes(count: float) -> str:
    """A number of bytes in binary units: ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_time(value: float) -> str:
    """Format a time as people write it."""
    if value < 0.1:
        return f"{1000 * value:.1f} ms"
    if value < 2 * 60:
        return f"{value:.2f} s"
    if value < 2 * 3600:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:,.1f} h"
