"""How a job ended: the earliest failure of any rank or node is its cause.

One failing rank makes the others fail, because their collectives lose a peer. When a rank failed,
`rank_failure` decides; times of different machines are those of their own clocks, and are compared
as they are.

Each agent sends one `NodeReport`; `resolve_outcome` makes one `JobOutcome` of all. What an agent
receives is checked field by field by pydantic: JSON has numbers that no clock shows, and texts that
no encoding can hold.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from anygauge.interface import LOST, STOPPED
from anygauge.util.section import Count, Flag, Text, first_complaint

_LONGEST_S = 1e12

_CLOSED = ConfigDict(extra="forbid")


def _check_signal(number: int) -> int:
    return int(signal.Signals(number))


Time = Annotated[float, Strict(), Field(gt=-_LONGEST_S, lt=_LONGEST_S)]
ExitStatus = Annotated[int, Strict(), Field(ge=0, lt=256)]
SignalNumber = Annotated[int, Strict(), AfterValidator(_check_signal)]

TEXT = TypeAdapter[str](Text)
TIME = TypeAdapter[float](Time)
SIGNAL_OR_NONE = TypeAdapter[int | None](SignalNumber | None)


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
        error_kind: see `AnygaugeError.kind`; "" where it is not for the user.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    time: Time
    text: Text
    rank: Count | None = None
    by_signal: Flag = False
    exit_status: ExitStatus = 1
    final: Flag = False
    lost: Flag = False
    error_kind: Text = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """How the ranks of one node ended.

    Attributes:
        ok: all finished their work and exited with 0.
        stopped: if all ended on request, where; "" where only another node's rank 0 says that.
        failures: of those that this agent did not end itself.
        signalled_at: when this node received a request to end, in seconds since the epoch.
        signum: the signal of that request.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    node_rank: Count
    host: Text
    ok: Flag = False
    stopped: Text | None = None
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
        error_kind: of the failure that is the cause.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    state: Literal["ok", "stopped", "cancelled", "failed", "lost", "again"]
    exit_status: ExitStatus
    cause: Text | None = None
    final: Flag = True
    rendezvous: Text = ""
    error_kind: Text = ""


def resolve_outcome(reports: Sequence[NodeReport]) -> JobOutcome:
    """Make one outcome of all nodes' reports; the coordinator writes that of a lost node."""
    if all(report.ok for report in reports):
        return JobOutcome(state="ok", exit_status=0)
    if all(report.stopped is not None for report in reports):
        text = next((report.stopped for report in reports if report.stopped), "")
        return JobOutcome(state="stopped", exit_status=STOPPED, cause=text)
    failures = [failure for report in reports for failure in report.failures]
    first = min(failures, key=_cause_order, default=None)
    requests = [
        (r.signalled_at, r.signum or signal.SIGTERM)
        for r in reports
        if r.signalled_at is not None and (first is None or first.time >= r.signalled_at)
    ]
    if requests:
        _, number = min(requests)
        text = f"ended by {signal.Signals(number).name}"
        return JobOutcome(state="cancelled", exit_status=128 + number, cause=text)
    if first is None:
        names = ", ".join(f"node {r.node_rank} ({r.host})" for r in reports if not r.ok)
        text = f"the ranks of {names} ended before their work was done and reported no cause"
        return JobOutcome(state="failed", exit_status=1, cause=text)
    if first.lost:
        return JobOutcome(state="lost", exit_status=LOST, cause=first.text)
    status = first.exit_status
    return JobOutcome(
        state="failed",
        exit_status=status,
        cause=first.text,
        final=first.final,
        error_kind=first.error_kind,
    )


def stopped_text(event: Mapping[str, Any]) -> str:
    """A ``stopped`` event in words; "" of any rank but 0."""
    if "checkpoint" not in event:
        return ""
    return f"stopped at request after step {event.get('step')}; checkpoint: {event['checkpoint']}"


def _cause_order(failure: JobFailure) -> tuple[float, bool, int]:
    """The earliest caused the others; of two at the same time, a death by signal."""
    return (failure.time, not failure.by_signal, -1 if failure.rank is None else failure.rank)


# -- what other nodes send -------------------------------------------------------------------------

RecordT = TypeVar("RecordT")


def field_of(message: Mapping[str, Any], name: str, kind: TypeAdapter[RecordT]) -> RecordT:
    """Read one field; None where it is missing and may be.

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
