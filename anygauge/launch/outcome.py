"""How a job ended: the earliest failure of any rank or node is its cause.

One failing rank makes the others fail, because their collectives lose a peer. Times are known with
different precision:

- A ``failed`` event carries the rank's own clock. A rank reports before it closes its connections,
  so its event precedes whatever it causes in others.
- A process that is killed from outside reports nothing. It died between the moment it was last seen
  alive (the kernel had not begun to take it down) and the moment its exit was noticed. By the
  latter a peer may have reported a broken connection already. A peer cannot have caused such a
  death, but the death may well have caused the peer's report, so the *earlier* bound counts.
- An abort (SIGABRT) may be caused by a peer: communication libraries abort when a connection
  breaks. There the moment of observation counts.
- Times of different machines are those of their own clocks, and are compared as they are.

Each agent sends one `NodeReport`; `resolve_outcome` makes one `JobOutcome` of all. What an agent
receives is checked field by field by pydantic: JSON has numbers that no clock shows, and texts that
no encoding can hold.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)

from anygauge.interface import LOST, STOPPED
from anygauge.util.processes import describe_exit
from anygauge.util.schema import Count, Flag, Text, first_complaint

LAST_LINES = 15
_TAIL_BYTES = 64 * 1024
_LONGEST_S = 1e12

_CLOSED = ConfigDict(extra="forbid")


def _signal(number: int) -> int:
    return int(signal.Signals(number))


Time = Annotated[float, Strict(), Field(gt=-_LONGEST_S, lt=_LONGEST_S)]
ExitStatus = Annotated[int, Strict(), Field(ge=0, lt=256)]
SignalNumber = Annotated[int, Strict(), AfterValidator(_signal)]

TEXT = TypeAdapter[str](Text)
TIME = TypeAdapter[float](Time)
SIGNAL_OR_NONE = TypeAdapter[int | None](SignalNumber | None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One rank's failure, as its agent knows it.

    Attributes:
        time: seconds since the epoch, by the rules above.
        what: what happened, to follow "rank 3 on host"; for a user's error, the whole message.
        for_user: `what` is all that helps; no log is needed.
        exit_status: what the command line should exit with.
        error: class and message as the rank reported them, if it did.
        by_signal: no other rank can have caused it.
    """

    rank: int
    time: float
    what: str
    for_user: bool = False
    exit_status: int = 1
    error: Mapping[str, str] | None = None
    by_signal: bool = False

    @classmethod
    def from_event(cls, rank: int, event: Mapping[str, Any], received: float) -> Failure:
        """The failure that a rank reported itself."""
        with contextlib.suppress(ValueError):
            received = field_of(event, "time", TIME)
        name, message = str(event.get("error", "")), str(event.get("message", "")).strip()
        for_user = event.get("for_user") is True
        status = event.get("exit_status")
        reason = ": ".join(part for part in (name, message) if part) or "no reason given"
        return cls(
            rank=rank,
            time=received,
            what=message if for_user and message else f"failed with {reason}",
            for_user=for_user and bool(message),
            exit_status=status if isinstance(status, int) and 0 < status < 256 else 1,
            error={"class": name, "message": message},
        )

    @classmethod
    def from_exit(
        cls, rank: int, code: int, *, finished: bool, last_alive: float, observed: float
    ) -> Failure:
        """The failure of a rank that exited without a report.

        Args:
            code: its exit code, as `subprocess` reports it.
            finished: it had finished its work before.
            last_alive: when it was last seen alive, in seconds since the epoch.
            observed: when its exit was noticed.
        """
        if code == -signal.SIGKILL:
            what = (
                f"was killed ({describe_exit(code)}): often by the kernel, out of memory; see "
                "`dmesg` or the scheduler's log"
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
        return cls(
            rank=rank,
            time=observed if aborted else last_alive,
            what=what,
            by_signal=code < 0 and not aborted,
        )

    def cause(
        self, *, host: str, world_size: int, log: Path, log_offset: int, record: Path | None = None
    ) -> str:
        """The failure in words: who, what, and the end of its log.

        Args:
            log_offset: where this run begins in the rank's log, in bytes.
            record: of its collectives, named if it is there; see `Job.collectives_record`.
        """
        who = f"rank {self.rank} on {host}"
        if self.for_user:
            return self.what if world_size == 1 else f"{self.what}\n({who})"
        lines = tail(log, log_offset)
        text = f"{who} {self.what}\nits log: {log}"
        if record is not None and record.is_file():
            text += f"\nwhat its collectives were doing: {record} (torchfrtrace reads all ranks')"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFailure:
    """A rank's or a node's failure, as all nodes compare it.

    Attributes:
        time: seconds since the epoch, by the clock of its machine.
        text: who, what, and the end of its log.
        rank: None for a whole node.
        by_signal: no other rank can have caused it.
        exit_status: what the job should exit with.
        final: another attempt would fail in the same way: the message is for the user.
        lost: a node that sends no heartbeats any more.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    time: Time
    text: Text
    rank: Count | None = None
    by_signal: Flag = False
    exit_status: ExitStatus = 1
    final: Flag = False
    lost: Flag = False


class _Stopped(BaseModel):
    """Of an event ``stopped``, what is read here."""

    step: Count | None = None
    checkpoint: Text | None = None


def _stopped(event: Mapping[str, Any]) -> Mapping[str, Any]:
    _Stopped.model_validate(event)
    return event


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """How the ranks of one node ended.

    Attributes:
        ok: all finished their work and exited with 0.
        stopped: if all ended on request, the event of one of them.
        failures: of those that this agent did not end itself.
        signalled_at: when this node received a request to end, in seconds since the epoch.
        signum: the signal of that request.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    node_rank: Count
    host: Text
    ok: Flag = False
    stopped: Annotated[Mapping[str, Any], AfterValidator(_stopped)] | None = None
    failures: tuple[JobFailure, ...] = ()
    signalled_at: Time | None = None
    signum: SignalNumber | None = None

    def record(self) -> dict[str, Any]:
        """Plain values; `read_record` reads them back."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How the job ended.

    Attributes:
        state: ``ok``, ``stopped`` (on request, with a checkpoint), ``cancelled``, ``failed``,
            ``lost`` (a node is gone), or ``again`` (failed, and the ranks start once more).
        cause: in words, where it is not ok.
        final: another attempt would not help.
        rendezvous: where the ranks of the next attempt meet.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    state: Literal["ok", "stopped", "cancelled", "failed", "lost", "again"]
    exit_status: ExitStatus
    cause: Text | None = None
    final: Flag = True
    rendezvous: Text = ""


def resolve_outcome(reports: Sequence[NodeReport]) -> JobOutcome:
    """One outcome from the reports of all nodes; the coordinator writes that of a lost node."""
    failures = [failure for report in reports for failure in report.failures]
    first = min(failures, key=_order, default=None)
    signalled = [r for r in reports if r.signalled_at is not None]
    request = min(signalled, key=lambda report: report.signalled_at or 0.0, default=None)
    if all(report.ok for report in reports):
        return JobOutcome(state="ok", exit_status=0)
    if all(report.stopped is not None for report in reports):
        event = next((r.stopped for r in reports if r.stopped and "checkpoint" in r.stopped), {})
        return JobOutcome(state="stopped", exit_status=STOPPED, cause=stopped_text(event))
    if request is not None and not (
        first is not None and first.time < (request.signalled_at or 0.0)
    ):
        number = request.signum or signal.SIGTERM
        text = f"ended by {signal.Signals(number).name}"
        return JobOutcome(state="cancelled", exit_status=128 + number, cause=text)
    if first is None:
        names = ", ".join(f"node {r.node_rank} ({r.host})" for r in reports if not r.ok)
        text = f"the ranks of {names} ended before their work was done and reported no cause"
        return JobOutcome(state="failed", exit_status=1, cause=text)
    if first.lost:
        return JobOutcome(state="lost", exit_status=LOST, cause=first.text)
    return JobOutcome(
        state="failed", exit_status=first.exit_status, cause=first.text, final=first.final
    )


def stopped_text(event: Mapping[str, Any]) -> str:
    """A ``stopped`` event in words."""
    return (
        f"stopped at request after step {event.get('step')}; checkpoint: {event.get('checkpoint')}"
    )


def _order(failure: JobFailure) -> tuple[float, bool, int]:
    """The earliest caused the others; of two at the same time, a death by signal."""
    return (failure.time, not failure.by_signal, -1 if failure.rank is None else failure.rank)


# -- what other nodes send -------------------------------------------------------------------------

RecordT = TypeVar("RecordT")


def field_of(message: Mapping[str, Any], name: str, kind: TypeAdapter[RecordT]) -> RecordT:
    """One field; None where it is missing and may be.

    Raises:
        ValueError: it is not what it must be; names it.
    """
    try:
        return kind.validate_python(message.get(name))
    except ValidationError as error:
        problem = f": {first_complaint(error)}" if name in message else " is missing"
        raise ValueError(f"{name!r}{problem}") from None


def read_record(kind: TypeAdapter[RecordT], record: object) -> RecordT:
    """A record that another node sent: its fields and no others.

    Raises:
        ValueError: a field is missing, unknown, or not what it must be; names it.
    """
    try:
        return kind.validate_python(record)
    except ValidationError as error:
        raise ValueError(first_complaint(error)) from None


REPORT = TypeAdapter(NodeReport)
OUTCOME = TypeAdapter(JobOutcome)
