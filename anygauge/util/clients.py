"""Running the command-line client of a cluster or a cloud, such as kubectl, within a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from anygauge.util.errors import AnygaugeError


class NotInstalledError(AnygaugeError):
    """This machine does not have the client."""


class NoAnswerError(AnygaugeError):
    """The client did not answer in time: its request may have been carried out or not."""


def run_client(
    argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a client's command and return what it printed, whatever its exit status.

    Args:
        stdin: text for its standard input; None: it has none.

    Raises:
        NotInstalledError: this machine does not have the client.
        NoAnswerError: it does not answer in time.
    """
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            # Ctrl-C is for this process: it must not interrupt the client's request.
            start_new_session=True,
            **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
        )
    except FileNotFoundError as error:
        raise NotInstalledError(
            f"{argv[0]} is not installed here: submit from a machine that has it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{argv[0]} did not answer within {error.timeout:g} s") from error


def client_output(done: subprocess.CompletedProcess[str]) -> str:
    """What a client that refused has printed: its errors, or else its output.

    Of a long text the first and the last lines are kept.
    """
    return "\n  ".join(first_and_last((done.stderr or done.stdout).splitlines()))


def first_and_last(lines: Sequence[str], count: int = 8) -> list[str]:
    """The lines that are not blank; of more than 2 * `count` the first and the last `count`."""
    found = [line.rstrip() for line in lines if line.strip()]
    if len(found) > 2 * count:
        found[count:-count] = ["..."]
    return found


def last_line(text: str) -> str:
    """The last line that is not blank; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
