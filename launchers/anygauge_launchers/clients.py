"""Asking a cluster through its own command-line client."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from anygauge.interface import AnygaugeError

LIMIT_S = 120.0
_LINES = 8


class NotInstalledError(AnygaugeError):
    """There is no such client on this machine."""


class NoAnswerError(AnygaugeError):
    """A client that did not answer in time: what it was told may have been done or not."""


def ask(
    argv: Sequence[str], *, given: str | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a client's command and return what it printed, whatever its exit status.

    Args:
        given: its standard input.

    Raises:
        NotInstalledError: it is not installed.
        NoAnswerError: it does not answer in time.
    """
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            # Ctrl-C is for this process: it must not break off what is being asked.
            start_new_session=True,
            **({"stdin": subprocess.DEVNULL} if given is None else {"input": given}),
        )
    except FileNotFoundError as error:
        raise NotInstalledError(
            f"{argv[0]} is not installed here: submit from a machine that has it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{argv[0]} did not answer within {error.timeout:g} s") from error


def words(done: subprocess.CompletedProcess[str]) -> str:
    """What a client that refused has said: its errors, or else its output, of bounded length."""
    lines = [line.rstrip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    if len(lines) > 2 * _LINES:
        lines[_LINES:-_LINES] = ["..."]
    return "\n  ".join(lines)


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
