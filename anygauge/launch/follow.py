"""A run as its user sees it: progress while it runs, then its summary or the cause of failure."""

from __future__ import annotations

import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from anygauge.interface import STOPPED, RunningJob
from anygauge.launch.attempt import SIGNALS
from anygauge.launch.run_directory import logs_of
from anygauge.launch.view import GLANCE_S, View, explain, show_stopped, where_logs_are
from anygauge.util.console import Console
from anygauge.util.processes import REPEATED_SIGNAL_S

Event = Mapping[str, Any]

_MOST_WAITING = 10_000
"""Events that are kept for a terminal, beyond which steps are not."""


class Signals:
    """Takes Ctrl-C and what else asks for the end, while it is entered; in the main thread, which
    alone gets signals.

    Attributes:
        received: those that count, in their order: one that follows another too soon is the same.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._job: RunningJob | None = None
        self._counted = -math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                # Under nohup, the end of the terminal does not ask for anything. None is a handler
                # of the program around this interpreter, which could not be put back.
                if before is not None and (number != signal.SIGHUP or before != signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def end_with(self, running: RunningJob) -> None:
        """From now on, each cancels the job, unless it can run on by itself: then whoever follows
        it is asked what is meant."""
        if running.record is None:
            self._job = running

    def _take(self, signum: int, frame: FrameType | None) -> None:
        # Later than the supervisor's own limit, so that it counts whatever is counted here.
        if time.monotonic() - self._counted < 2 * REPEATED_SIGNAL_S:
            return
        self._counted = time.monotonic()
        self.received.append(signum)
        if self._job is not None:
            self._job.cancel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a job ended for the one who followed it.

    Attributes:
        state: ``ok``, ``stopped`` (on request, with a checkpoint), ``cancelled`` (on request),
            ``left`` (it runs on), or ``failed``.
        status: the exit status: that of the job (`STOPPED` where it stopped), or 128 + the signal
            by which the user ended it.
        text: in words, where it is none of ``ok`` and ``left``.
        kind: of a failure's error; see `AnygaugeError.kind`.
        signals: what the user ended it by.
    """

    state: str = "ok"
    status: int = 0
    text: str = ""
    kind: str = ""
    signals: Sequence[int] = ()

    def show(self, run_directory: str | Path, errors: Console | None = None) -> int:
        """Print it, and return the exit status.

        Args:
            errors: None for standard error.
        """
        errors = errors or Console(stderr=True)
        if self.state == "stopped":
            show_stopped(errors, self.text)
        elif self.state == "cancelled":
            errors.print(self.text)
        elif self.state == "failed":
            explain(errors, self.text)
        if self.state in ("cancelled", "failed"):
            errors.print(f"logs: {where_logs_are(run_directory)}", soft_wrap=True)
        return self.status


def follow(
    running: RunningJob,
    *,
    run_directory: str | Path,
    quiet: bool = False,
    console: Console | None = None,
    signals: Signals | None = None,
) -> Ending:
    """Show a job until it ends. Ctrl-C ends its ranks in order, a second time kills them.

    Before the ranks train there is nothing to save: then they end at once.

    A job that can run on by itself (`RunningJob.record`) is left to itself by SIGTERM; on a
    terminal Ctrl-C asks what is meant.

    Args:
        quiet: only warnings and how it ended.
        console: where the run is shown; None for standard output, with a bar on a terminal.
        signals: entered; for those that it has received, the job was asked to end.
    """
    console = console or Console(force_terminal=sys.stdout.isatty())
    view = View(console, quiet)
    with nullcontext(signals) if signals else Signals() as taken:
        taken.end_with(running)
        ended = _show_events(running, view, taken.received)
        if ended is None:
            console.print(f"to follow it again: anygauge job follow {run_directory}")
            return Ending(state="left")
    state, received = ended.get("state"), tuple(taken.received)
    if received and state in ("cancelled", None):
        when = "" if view.began else " before the first step; there was nothing to save"
        text = f"ended on request{when}; the ranks have ended"
        status = 128 + received[0]
        return Ending(state="cancelled", status=status, text=text, signals=received)
    if not ended:
        log = logs_of(Path(run_directory)) / "agent0.log"
        text = f"the agent died before it could report; see {log}"
        return Ending(state="failed", status=1, text=text)
    text, kind = str(ended.get("cause") or ""), str(ended.get("kind") or "")
    if state == "stopped":
        return Ending(state=state, status=STOPPED, text=text, signals=received)
    if state == "ok":
        view.summary()
        return Ending(signals=received)
    text = text or "the run ended early, and no cause was reported"
    status = int(ended.get("exit_status") or 1)
    return Ending(state="failed", status=status, text=text, kind=kind, signals=received)


def _show_events(running: RunningJob, view: View, signals: list[int]) -> Event | None:
    """Show what happens; returns how the job ended, empty where nobody reported that, None where it
    was left to itself."""
    ended: Event = {}
    handled = len(signals)
    stream = _stream_events(running)
    try:
        with view.drawn_bar():
            if handled:
                view.line(view.request_effect, "notice")
            for event in stream:
                if len(signals) > handled:
                    if running.record is not None and _leaves_job(running, signals, view):
                        return None
                    handled = len(signals)
                    if handled:
                        text = view.request_effect if handled == 1 else "killing the ranks"
                        view.line(text, "notice")
                if event is None:
                    continue
                if event["event"] == "ended":
                    ended = event
                else:
                    view.show(event)
    except BaseException:  # the terminal was closed, or the reader of a pipe has gone
        if running.record is None:
            if not signals:
                running.cancel()
            for _ in stream:  # its ranks end in order, with nobody to tell
                pass
        raise
    return ended


def _leaves_job(running: RunningJob, signals: list[int], view: View) -> bool:
    """What a signal means for a job that can run on by itself: True to leave it."""
    if signals[-1] != signal.SIGINT:
        return True
    answer = "c"
    if len(signals) == 1 and sys.stdin.isatty():
        question = "d to detach (the job runs on), c to cancel it, Enter to keep following: "
        answer = view.ask(question, signals)
    if answer == "c":
        running.cancel()
    elif answer != "d":
        signals.clear()
    return answer == "d"


def _stream_events(running: RunningJob) -> Iterator[Event | None]:
    """The events, with None now and then while none arrives.

    A thread reads them: a signal in the middle of a read then loses nothing, and a terminal that
    takes no more text (Ctrl-S) stops nobody: steps that it is late for are not kept.
    """
    arrived: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for event in running.events():
                if event["event"] != "step" or arrived.qsize() < _MOST_WAITING:
                    arrived.put(event)
            arrived.put(None)
        except BaseException as error:  # raised again by the one who waits
            arrived.put(error)

    threading.Thread(target=read, name="events", daemon=True).start()
    while True:
        try:
            item = arrived.get(timeout=GLANCE_S)
        except queue.Empty:
            yield None
            continue
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        yield item
