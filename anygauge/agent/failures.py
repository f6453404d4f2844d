"""Which failure came first, and how to say it.

One failing rank makes the others fail: their collectives lose a peer. The failure to name is the
earliest, and time is known with different precision:

- A `failed` event carries the rank's own clock. A rank reports before it closes its connections,
  so its event precedes whatever it causes in others.
- A process killed from outside reports nothing. Its death lies between the moment it was last seen
  alive (the kernel had not begun to take it down) and the moment its exit was observed; by the
  latter, a peer may already have reported a broken connection. Such a death is not caused by a
  peer, whereas the peer's report may well be caused by it, so the *earlier* bound counts.
- An abort (SIGABRT) may be caused by a peer: communication libraries abort when a connection
  breaks. There the moment of observation counts.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.agent.messages import is_time
from anygauge.util.processes import describe_exit

LAST_LINES = 15
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One rank's end before its time.

    Attributes:
        time: seconds since the epoch, by the rule above.
        what: what happened, after "rank 3 on host"; for a user's error, the whole message.
        for_user: `what` says all that helps, no log is needed.
        exit_status: what the command line should exit with.
        error: class and message as the rank reported them, if it did.
        by_signal: nobody in the run can have caused it.
    """

    rank: int
    time: float
    what: str
    for_user: bool = False
    exit_status: int = 1
    error: Mapping[str, str] | None = None
    by_signal: bool = False


def from_event(rank: int, event: Mapping[str, Any], received: float) -> Failure:
    """The failure that a rank reported itself."""
    time: Any = event.get("time")
    name, message = str(event.get("error", "")), str(event.get("message", "")).strip()
    for_user = event.get("for_user") is True
    status = event.get("exit_status")
    words = ": ".join(part for part in (name, message) if part) or "no reason given"
    return Failure(
        rank=rank,
        time=float(time) if is_time(time) else received,
        what=message if for_user and message else f"failed with {words}",
        for_user=for_user and bool(message),
        exit_status=status if isinstance(status, int) and 0 < status < 256 else 1,
        error={"class": name, "message": message},
    )


def from_exit(
    rank: int, code: int, *, finished: bool, seen_alive: float, observed: float
) -> Failure:
    """The failure of a rank that ended without a word; `code` as `subprocess` reports it."""
    if code == -signal.SIGKILL:
        what = (
            f"was killed ({describe_exit(code)}): often the kernel, out of memory; "
            "`dmesg` or the scheduler's log would tell"
        )
    elif code < 0:
        what = f"died ({describe_exit(code)})"
    elif code > 0:
        what = f"ended with {describe_exit(code)} and reported no error"
    else:
        what = "ended early: exit status 0, but its work was not finished"
    if finished:
        what += ", after it had finished its work"
    aborted = code == -signal.SIGABRT
    return Failure(
        rank=rank,
        time=observed if aborted else seen_alive,
        what=what,
        by_signal=code < 0 and not aborted,
    )


def cause(failure: Failure, *, host: str, world_size: int, log: Path, log_offset: int) -> str:
    """The failure in words: who, what, where to read more.

    Args:
        log_offset: where this run begins in the rank's log, in bytes.
    """
    who = f"rank {failure.rank} on {host}"
    if failure.for_user:
        return failure.what if world_size == 1 else f"{failure.what}\n({who})"
    lines = tail(log, log_offset)
    text = f"{who} {failure.what}\nits log: {log}"
    if lines:
        text += "\nlast lines of it:\n" + "\n".join(f"  | {line}" for line in lines)
    return text


def tail(log: Path, offset: int, count: int = LAST_LINES) -> list[str]:
    """The last non-empty lines of a log, from `offset` bytes on; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # A progress bar redraws its line with carriage returns: only its last state is of interest.
    lines = [line.rstrip().rsplit("\r", 1)[-1] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]
