"""A run as its user sees it: progress while it runs, then its summary or the cause of failure."""

from __future__ import annotations

import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Self

from anygauge.interface import STOPPED, RunningJob
from anygauge.launch.attempt import SIGNALS
from anygauge.launch.run_directory import logs_of
from anygauge.launch.view import GLANCE_S, View, explain, show_stopped, show_where_logs_are
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
                # Under nohup, the end of the terminal does not ask for anything.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
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


def follow(
    running: RunningJob,
    *,
    run_directory: str | Path,
    quiet: bool = False,
    console: Console | None = None,
    errors: Console | None = None,
    signals: Signals | None = None,
) -> int:
    """Show a job until it ends. Ctrl-C ends its ranks in order, a second time kills them.

    Before the ranks train there is nothing to save: then they end at once.

    A job that can run on by itself (`RunningJob.record`) is left to itself by SIGTERM; on a
    terminal Ctrl-C asks what is meant.

    Args:
        quiet: only warnings and how it ended.
        console: where the run is shown; None for standard output, with a bar on a terminal.
        errors: where failures are shown; None for standard error.
        signals: entered; for those that it has received, the job was asked to end.

    Returns:
        The exit status: that of the job (`STOPPED` where it wrote a checkpoint at the user's
        request), or 128 + the signal by which the user ended it.
    """
    console = console or Console(force_terminal=sys.stdout.isatty())
    view = View(console, quiet)
    errors = errors or Console(stderr=True)
    with nullcontext(signals) if signals else Signals() as taken:
        taken.end_with(running)
        ended = _show_events(running, view, taken.received)
        if ended is None:
            console.print(f"to follow it again: anygauge job follow {run_directory}")
            return 0
    state = ended.get("state")
    if taken.received and state in ("cancelled", None):
        when = "" if view.began else " before the first step; there was nothing to save"
        errors.print(f"ended on request{when}; the ranks have ended")
        show_where_logs_are(errors, run_directory)
        return 128 + taken.received[0]
    if not ended:
        log = logs_of(Path(run_directory)) / "agent0.log"
        explain(errors, f"the agent died before it could report; see {log}")
        return 1
    if state == "stopped":
        show_stopped(errors, str(ended.get("cause")))
        return STOPPED
    if state == "ok":
        view.summary()
        return 0
    explain(errors, str(ended.get("cause") or "the run ended early, and no cause was reported"))
    show_where_logs_are(errors, run_directory)
    return int(ended.get("exit_status") or 1)


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
    except OSError:  # the terminal was closed, or the reader of a pipe has gone
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
