"""How a job ended, from what the agents of its nodes report: one cause, one exit status."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anygauge.agent.messages import (
    Check,
    field_of,
    fields_of,
    is_count,
    is_signal,
    is_status,
    is_text,
    is_time,
    is_truth,
    or_none,
)
from anygauge.interface import LOST, STOPPED


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFailure:
    """One rank's or node's end before its time, as the whole job sees it.

    Attributes:
        time: seconds since the epoch, by the coordinator's clock; see `anygauge.agent.failures`.
        text: who, what, and the last lines of its log.
        rank: None for a whole node.
        by_signal: nobody in the run can have caused it.
        exit_status: what the job should exit with.
        final: another attempt would end the same way: the message is for the user.
        lost: a node that is not heard from any more.
    """

    time: float
    text: str
    rank: int | None = None
    by_signal: bool = False
    exit_status: int = 1
    final: bool = False
    lost: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of one node's ranks.

    Attributes:
        ok: all did their work and left in order.
        stopped: the event of one that was asked to end and did so, if all were.
        endings: of those that failed on their own account.
        signalled_at: when this node was asked to end, in seconds since the epoch.
        signum: by which signal.
    """

    node_rank: int
    host: str
    ok: bool = False
    stopped: Mapping[str, Any] | None = None
    failures: tuple[JobFailure, ...] = ()
    signalled_at: float | None = None
    signum: int | None = None

    def record(self) -> dict[str, Any]:
        """Plain values; `parse_report` reads them back."""
        return asdict(self)


_FAILURE: Mapping[str, Check] = {
    "time": is_time, "text": is_text, "rank": or_none(is_count), "by_signal": is_truth,
    "exit_status": is_status, "final": is_truth, "lost": is_truth,
}  # fmt: skip
_REPORT: Mapping[str, Check] = {
    "node_rank": is_count, "host": is_text, "ok": is_truth,
    "stopped": or_none(lambda value: isinstance(value, dict)),
    "failures": lambda value: isinstance(value, list | tuple),
    "signalled_at": or_none(is_time), "signum": or_none(is_signal),
}  # fmt: skip
_OUTCOME: Mapping[str, Check] = {
    "state": lambda value: value in ("ok", "stopped", "cancelled", "failed", "lost", "again"),
    "exit_status": is_status, "cause": or_none(is_text), "final": is_truth, "rendezvous": is_text,
}  # fmt: skip


def parse_report(record: object, *, least: float, most: float) -> Report:
    """A report from another node, its times by the clock of this one.

    Args:
        least: seconds that this clock is ahead of the other, at the least.
        most: and at the most; messages between the two took what lies between.

    Raises:
        ValueError: a field is missing, unknown, or has a value that it cannot have; says which.
    """
    likely = (least + most) / 2
    fields = fields_of(record, _REPORT)
    failures = []
    for each in fields["failures"]:
        failure = fields_of(each, _FAILURE)
        # A death by signal counts from the earliest moment that it can have come.
        ahead = min(least, most) if failure["by_signal"] else likely
        failures.append(JobFailure(**{**failure, "time": failure["time"] + ahead}))
    at, stopped = fields["signalled_at"], fields["stopped"]
    if stopped:
        field_of(stopped, "step", or_none(is_count))
        field_of(stopped, "checkpoint", or_none(is_text))
    return Report(
        **{
            **fields,
            "failures": tuple(failures),
            "signalled_at": None if at is None else at + likely,
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How the job ended.

    Attributes:
        state: ``ok``, ``stopped`` (at request, with a checkpoint), ``cancelled``, ``failed``,
            ``lost`` (a node is gone), or ``again`` (failed, and the ranks start once more).
        cause: in words, where it is not ok.
        final: another attempt would not help.
        rendezvous: where the ranks of the next attempt meet.
    """

    state: str
    exit_status: int
    cause: str | None = None
    final: bool = True
    rendezvous: str = ""


def parse_outcome(record: object) -> JobOutcome:
    """What the coordinator says of the job's end.

    Raises:
        ValueError: a field is missing, unknown, or has a value that it cannot have; says which.
    """
    return JobOutcome(**fields_of(record, _OUTCOME))


def resolve_outcome(reports: Sequence[Report]) -> JobOutcome:
    """The outcome over the reports of all nodes; a lost node's is made by those who lost it."""
    failures = [failure for report in reports for failure in report.failures]
    first = min(failures, key=_order, default=None)
    asked = [r for r in reports if r.signalled_at is not None]
    request = min(asked, key=lambda report: report.signalled_at or 0.0, default=None)
    if all(report.ok for report in reports):
        return JobOutcome(state="ok", exit_status=0)
    if all(report.stopped is not None for report in reports):
        event = next((r.stopped for r in reports if r.stopped and "checkpoint" in r.stopped), {})
        return JobOutcome(state="stopped", exit_status=STOPPED, cause=stopped_words(event))
    if request is not None and not (
        first is not None and first.time < (request.signalled_at or 0.0)
    ):
        number = request.signum or signal.SIGTERM
        text = f"ended by {signal.Signals(number).name}"
        return JobOutcome(state="cancelled", exit_status=128 + number, cause=text)
    if first is None:
        names = ", ".join(f"node {r.node_rank} ({r.host})" for r in reports if not r.ok)
        text = f"the ranks of {names} ended before their work was done, and no cause was reported"
        return JobOutcome(state="failed", exit_status=1, cause=text)
    if first.lost:
        return JobOutcome(state="lost", exit_status=LOST, cause=first.text)
    return JobOutcome(
        state="failed", exit_status=first.exit_status, cause=first.text, final=first.final
    )


def stopped_words(event: Mapping[str, Any]) -> str:
    """A ``stopped`` event in words."""
    return (
        f"stopped at request after step {event.get('step')}; checkpoint: {event.get('checkpoint')}"
    )


def _order(failure: JobFailure) -> tuple[float, bool, int]:
    """The earliest caused the others; of two at the same time, a death by signal."""
    return (failure.time, not failure.by_signal, -1 if failure.rank is None else failure.rank)
