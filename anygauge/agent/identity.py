"""Which node an agent is, and where the coordinator is: given, or in a variable of the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from anygauge.interface import AnygaugeError


def read_number(
    text: str, environ: Mapping[str, str], what: str, *, absent: int | None = None
) -> int:
    """A number, or ``$NAME`` of the variable that holds it.

    Args:
        what: in words, for errors.
        absent: what an unset variable means; None: an error.

    Raises:
        AnygaugeError: the variable is unset, or it is not a number.
    """
    if absent is not None and text.startswith("$") and not environ.get(text[1:]):
        return absent
    value = _value(text, environ, what)
    if not value.isascii() or not value.isdecimal():
        raise AnygaugeError(f"{what}: {text} is {value!r}, not a number from 0")
    return int(value)


def read_variables(path: str) -> dict[str, str]:
    """Variables by value from a file of JSON.

    Raises:
        AnygaugeError: it cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text())
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise AnygaugeError(f"{path} is not a file of variables: {error}") from error


def read_coordinator(text: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """``host:port``; the host may be ``$NAME`` of the variable that holds it.

    Raises:
        AnygaugeError: the variable is unset, or there is no port.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AnygaugeError(f"the coordinator of the job: {text!r} is not host:port")
    return _value(host, environ, "the coordinator of the job").strip("[]"), int(port)


def _value(text: str, environ: Mapping[str, str], what: str) -> str:
    if not text.startswith("$"):
        return text
    value = environ.get(text[1:], "")
    if not value:
        raise AnygaugeError(
            f"{what}: the variable {text[1:]} is not set here. This agent was not started in the "
            "way that its launcher expects"
        )
    return value
