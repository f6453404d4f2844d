"""A run as its user sees it: progress while it runs, then its summary or the cause of failure."""

from __future__ import annotations

import math
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anygauge.interface import STOPPED, RunningJob
from anygauge.launch.attempt import SIGNALS
from anygauge.launch.event_format import evaluation_line, step_line, step_metrics, summary_lines
from anygauge.launch.run_directory import logs_of
from anygauge.launch.submitted import LAUNCHED
from anygauge.util.console import Console
from anygauge.util.processes import REPEATED_SIGNAL_S

Event = Mapping[str, Any]
Handler = Callable[[int, FrameType | None], Any]


def follow(
    running: RunningJob,
    *,
    run_directory: str | Path,
    quiet: bool = False,
    console: Console | None = None,
    errors: Console | None = None,
    asked: Sequence[int] = (),
) -> int:
    """Show a job until it ends. Ctrl-C ends its ranks in order, a second time kills them.

    Before the ranks train there is nothing to save: then they end at once.

    A job that can run on by itself (`RunningJob.record`) is left to itself by SIGTERM; on a
    terminal Ctrl-C asks what is meant.

    Args:
        quiet: only warnings and how it ended.
        console: where the run is shown; None for standard output, with a bar on a terminal.
        errors: where failures are shown; None for standard error.
        asked: signals that came before, for which the job was asked to end.

    Returns:
        The exit status: that of the job (`STOPPED` where it wrote a checkpoint at the user's
        request), or 128 + the signal by which the user ended it.
    """
    console = console or Console(force_terminal=sys.stdout.isatty())
    errors = errors or Console(stderr=True)
    view = View(console, quiet)
    endings: list[Event] = []
    handled = len(asked)
    stream = _stream(running)
    with _interruptible(running, asked) as signals:
        try:
            with view.live():
                if handled:
                    view.line(view.ending, "notice")
                for event in stream:
                    if len(signals) > handled:
                        if running.record is not None and _leave(running, signals, view):
                            console.print(
                                f"to follow it again: anygauge job follow {run_directory}"
                            )
                            return 0
                        handled = len(signals)
                        if handled:
                            view.line(view.ending if handled == 1 else _KILLING, "notice")
                    if event is None:
                        continue
                    if event["event"] == "ended":
                        endings.append(event)
                    else:
                        view.show(event)
        except OSError:  # the terminal was closed, or the reader of a pipe has gone
            if running.record is None:
                if not signals:
                    running.cancel()
                for _ in stream:  # its ranks end in order, with nobody to tell
                    pass
                running.wait()
            raise
        status = running.wait()
    if signals and all(event.get("state") == "cancelled" for event in endings):
        when = "" if view.began else " before the first step; there was nothing to save"
        errors.print(f"ended on request{when}; the ranks have ended")
        show_where_logs_are(errors, run_directory)
        return 128 + signals[0]
    if not endings:
        log = logs_of(Path(run_directory)) / "agent0.log"
        fail(errors, f"the agent died before it could report (exit status {status}); see {log}")
        return 1
    stopped = next((event for event in endings if event.get("state") == "stopped"), None)
    if stopped is not None and all(e.get("state") == "stopped" for e in endings):
        show_stopped(errors, str(stopped.get("cause")))
        return STOPPED
    worst = next((event for event in endings if event.get("state") != "ok"), endings[-1])
    if worst.get("state") == "ok":
        view.summary()
        return 0
    fail(errors, str(worst.get("cause") or "the run ended early, and no cause was reported"))
    show_where_logs_are(errors, run_directory)
    return int(worst.get("exit_status") or 1)


@contextmanager
def handling(interrupt: Handler, terminate: Handler) -> Iterator[None]:
    """Handle Ctrl-C in one way meanwhile, and what else asks for the end in another; for the main
    thread."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread, which has its own plans
        return
    wanted = {signal.SIGINT: interrupt}
    for number in SIGNALS:
        # Under nohup, the end of the terminal does not ask for anything.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            wanted.setdefault(number, terminate)
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM wait until something is whole; yields those that came meanwhile."""
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    with handling(note, note):
        yield received


_ENDING = "ending: finishing the current step and writing a checkpoint (Ctrl-C again to kill)"
_NOTHING_YET = "ending: no step has been taken, so there is nothing to save (Ctrl-C again to kill)"
_NO_CHECKPOINT = (
    "ending: this run cannot write checkpoints; nothing is saved (Ctrl-C again to kill)"
)
_KILLING = "killing the ranks"
ROOM, METRIC = 33, 14
"""Columns for the step, a bar and the remaining time, which a narrow terminal has too; and for a
metric."""
_MOST_WAITING = 10_000
"""Events that are kept for a terminal, beyond which steps are not."""
_GLANCE_S = 0.1  # how soon a Ctrl-C is answered while no event arrives


def _leave(running: RunningJob, signals: list[int], view: View) -> bool:
    """What a signal means for a job that can run on by itself: True to leave it."""
    if signals[-1] != signal.SIGINT:
        return True
    answer = "c"
    if len(signals) == 1 and sys.stdin.isatty():
        answer = view.ask(
            "d to detach (the job runs on), c to cancel it, Enter to keep following: "
        )
    if answer == "d":
        return True
    if answer == "c":
        running.cancel()
    else:
        signals.clear()
    return False


def _end_of_input(signum: int, frame: FrameType | None) -> None:
    raise EOFError


class View:
    """Turns events into lines, and on a terminal into a bar below them.

    Attributes:
        began: ranks train, or have trained.
        stops: asked to end, they would finish a step and write a checkpoint.
    """

    def __init__(self, console: Console, quiet: bool) -> None:
        self.began = self.stops = False
        self._console = console
        self._quiet = quiet
        self._summary: Any = None
        self._drawn = console.draws and not quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, metrics="", visible=False)

    @property
    def ending(self) -> str:
        """What a request to end comes to now."""
        if not self.began:
            return _NOTHING_YET
        return _ENDING if self.stops else _NO_CHECKPOINT

    def live(self) -> AbstractContextManager[Any]:
        """Draw the bar for as long as the run lasts."""
        return self._bar if self._drawn else nullcontext()

    def line(self, text: str, level: str = "info") -> None:
        """One line of text, above the bar; ``info`` is what quiet leaves out."""
        if level == "info" and self._quiet:
            return
        if level == "warning":
            text = f"warning: {text}"
        self._console.print(text, style="" if level == "info" else "yellow")

    def ask(self, question: str) -> str:
        """A letter from the terminal; another Ctrl-C is c, SIGTERM and the end of input are d."""
        if self._drawn:
            self._bar.stop()
        try:
            with handling(signal.default_int_handler, _end_of_input):
                print(question, end="", flush=True)
                # A signal just before the terminal is read would otherwise wait for a line.
                while not select.select([sys.stdin], [], [], _GLANCE_S)[0]:
                    pass
                line = sys.stdin.readline()
            return line.strip().lower()[:1] if line else "d"
        except KeyboardInterrupt:
            return "c"
        except EOFError:
            return "d"
        finally:
            if self._drawn:
                self._bar.start()

    def show(self, event: Event) -> None:
        """What one event has to say; rank 0 speaks for all but in messages."""
        kind, rank = event["event"], event.get("rank") or 0
        if kind in ("started", "step") and not self.began:
            self.began, self.stops = True, bool(event.get("stops", True))
        if kind == "message":
            prefix = f"rank {rank}: " if rank else ""
            self.line(prefix + str(event.get("text", "")), str(event.get("level", "info")))
        elif rank:
            return
        elif kind == "started":
            for text in event.get("lines") or ():
                self.line(str(text))
            self._advance(int(event.get("done", 0)), event.get("steps"), "")
        elif kind == "step":
            if not self._drawn:
                self.line(step_line(event))
            else:
                # As many in each step, however long a figure is: the bar keeps its width.
                count = max(1, (self._console.width - ROOM) // METRIC)
                metrics = step_metrics(event)[:count]
                self._advance(int(event.get("step", 0)), event.get("steps"), "  ".join(metrics))
        elif kind == "evaluation":
            self.line(evaluation_line(event))
        elif kind == "finished":
            self._summary = event.get("summary")

    def summary(self) -> None:
        """What rank 0 said of the whole run."""
        for text in summary_lines(self._summary):
            self.line(text)

    def _advance(self, step: int, steps: int | None, metrics: str) -> None:
        self._bar.update(self._task, total=steps, visible=True)
        total = self._bar.tasks[0].total
        description = f"step {step}/{total:.0f}" if total is not None else f"step {step}"
        self._bar.update(self._task, completed=step, description=description, metrics=metrics)


def _stream(running: RunningJob) -> Iterator[Event | None]:
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
            item = arrived.get(timeout=_GLANCE_S)
        except queue.Empty:
            yield None
            continue
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        yield item


@contextmanager
def _interruptible(running: RunningJob, asked: Sequence[int]) -> Iterator[list[int]]:
    """Answer Ctrl-C and SIGTERM by cancelling the job; yields the signals received so far.

    Args:
        asked: those that were answered before.
    """
    received = list(asked)
    counted = -math.inf

    def cancel(signum: int, frame: FrameType | None) -> None:
        nonlocal counted
        # Later than the agent's own limit, so that the agent counts whatever is counted here.
        if time.monotonic() - counted < 2 * REPEATED_SIGNAL_S:
            return
        counted = time.monotonic()
        received.append(signum)
        if running.record is None:
            running.cancel()

    with handling(cancel, cancel):
        yield received


def show_stopped(errors: Console, how: str) -> None:
    """Show where a run stopped at request, and how to resume it."""
    errors.print(how, style="yellow")
    errors.print("to resume: the same command with --resume auto")


def fail(errors: Console, text: str) -> None:
    """Show why a run failed."""
    errors.print(f"error: {text}", style="red")


def show_where_logs_are(errors: Console, run_directory: str | Path) -> None:
    """Name the folder of a run's logs, or what would show them."""
    home = Path(run_directory)
    folder = logs_of(home)
    remote = (home / LAUNCHED).exists() and not any(folder.glob("rank*.log"))
    where = f"anygauge job logs {run_directory}" if remote else folder
    errors.print(f"logs: {where}", soft_wrap=True)
