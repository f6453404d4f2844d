"""A rank's failure: when it was, and what happened, in words.

Times are known with different precision:

- A ``failed`` event carries the rank's own clock. A rank reports before it closes its connections,
  so its event precedes whatever it causes in others.
- A process that is killed from outside reports nothing. It died between the moment it was last seen
  alive (the kernel had not begun to take it down) and the moment its exit was noticed. By the
  latter a peer may have reported a broken connection already. A peer cannot have caused such a
  death, but the death may well have caused the peer's report, so the *earlier* bound counts.
- An abort (SIGABRT) may be caused by a peer: communication libraries abort when a connection
  breaks. There the moment of observation counts.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge.launch.outcome import TIME, JobFailure, field_of
from anygauge.util.processes import describe_exit

_LAST_LINES = 15
_TAIL_BYTES = 64 * 1024


def reported_failure(rank: int, event: Mapping[str, Any], received: float) -> JobFailure:
    """The failure that a rank reported itself."""
    with contextlib.suppress(ValueError):
        received = field_of(event, "time", TIME)
    name, message = str(event.get("error", "")), str(event.get("message", "")).strip()
    final = event.get("for_user") is True and bool(message)
    status = event.get("exit_status")
    reason = ": ".join(part for part in (name, message) if part) or "no reason given"
    return JobFailure(
        rank=rank,
        time=received,
        text=message if final else f"failed with {reason}",
        final=final,
        error_kind=str(event.get("kind") or "") if final else "",
        exit_status=status if isinstance(status, int) and 0 < status < 256 else 1,
    )


def exit_failure(
    rank: int, code: int, *, finished: bool, last_alive: float, observed: float
) -> JobFailure:
    """The failure of a rank that exited without a report.

    Args:
        code: its exit code, as `subprocess` reports it.
        finished: it had finished its work before.
        last_alive: when it was last seen alive, in seconds since the epoch.
        observed: when its exit was noticed.
    """
    if code == -signal.SIGKILL:
        text = (
            f"was killed ({describe_exit(code)}): often by the kernel, out of memory; see "
            "`dmesg` or the scheduler's log"
        )
    elif code < 0:
        text = f"died ({describe_exit(code)})"
    elif code > 0:
        text = f"ended with {describe_exit(code)} and reported no error"
    else:
        text = "ended early: exit status 0, but its work was not finished"
    if finished:
        text += ", after it had finished its work"
    aborted = code == -signal.SIGABRT
    time = observed if aborted else last_alive
    return JobFailure(rank=rank, time=time, text=text, by_signal=code < 0 and not aborted)


def locate_failure(
    failure: JobFailure,
    *,
    host: str,
    world_size: int,
    log: Path,
    log_offset: int,
    more: str = "",
    record: Path | None = None,
) -> JobFailure:
    """A rank's failure with who it was, and the end of its log.

    Args:
        log_offset: where this run begins in the rank's log, in bytes.
        more: lines to add where the message is not for the user.
        record: of its collectives, named if it is there; see `Job.collectives_record`.
    """
    who = f"rank {failure.rank} on {host}"
    if failure.final:
        return failure if world_size == 1 else replace(failure, text=f"{failure.text}\n({who})")
    parts = [f"{who} {failure.text}", *filter(None, [more]), f"its log: {log}"]
    if record is not None and record.is_file():
        parts.append(f"what its collectives were doing: {record} (torchfrtrace reads all ranks')")
    if lines := tail(log, log_offset):
        parts += ["last lines of it:", *(f"  | {line}" for line in lines)]
    return replace(failure, text="\n".join(parts))


def tail(log: Path, offset: int, count: int = _LAST_LINES) -> list[str]:
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
