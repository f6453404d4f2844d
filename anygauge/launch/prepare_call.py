"""The other side of `anygauge.launch.prepare_process`: start it, pass its progress on, and say what
it died of.

It is bounded in silence and memory, by stage, and what it imports is gone with it. It also runs the
chat templates of commands: a template comes with a model, and may go on for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from anygauge.interface import AnygaugeError
from anygauge.launch.prepare_endings import PrepareWork
from anygauge.launch.prepare_request import PrepareAnswer
from anygauge.launch.watchdog import sample_process
from anygauge.models.hub import HubUnreachableError
from anygauge.util.errors import error_class
from anygauge.util.processes import parent_environment

if TYPE_CHECKING:
    from anygauge.launch.prepare_request import PrepareRequest

ENVIRONMENT = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}
"""No threads are made for work that is not there."""

_TURN_S = 0.1
_FROZEN_S = 2.0
_END_S = 10.0

Show = Callable[[Mapping[str, Any]], None]
"""Takes the events ``message`` (`text`) and ``fetching`` (`name`, `done` and `total` bytes, about
once a second)."""


def no_other_work() -> bool:
    """Tell `prepare` that its caller has nothing else to do meanwhile."""
    return True


def prepare(
    request: PrepareRequest,
    environ: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
    show: Show | None = None,
    turn: Callable[[], bool] = no_other_work,
) -> PrepareAnswer:
    """Run a request in a process of its own, which is gone afterwards, whatever happens.

    Args:
        environ: of the process; None: this one's.
        quiet: show no progress.
        show: takes progress; None: the terminal.
        turn: called ten times a second meanwhile; False gives up.

    Returns:
        What was found, until this one gave up. Where a plan takes too long, or its process ends,
        the answer says so.

    Raises:
        HubUnreachableError: no answer of the hub could be had.
        AnygaugeError: what the process refuses; or it hung or was killed.
    """
    from anygauge.launch.memory_check import not_planned

    if not (request.needs_fetch or request.stages):
        return PrepareAnswer()
    work = PrepareWork(request)
    fields: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile() as output,
        _on_terminal(quiet) if show is None else contextlib.nullcontext(show) as shown,
        _start_process(request, os.environ if environ is None else environ, output) as process,
    ):
        ending: AnygaugeError | None = None
        try:
            for event in _events(process, work, turn):
                match event["event"]:
                    case "message" | "fetching":
                        shown(event)
                    case "found":
                        fields |= event["fields"]
                    case "refused":
                        is_hub = event["error"] == HubUnreachableError.__name__
                        kind = HubUnreachableError if is_hub else error_class(event["error"])
                        raise kind(event["message"])
                    case "out_of_memory":
                        ending = work.out_of_memory(event["limit"])
                        break
                    case "done":
                        break
            else:
                if turn():
                    ending = work.crash_error(_reap(process), output)
        except TimeoutError:
            ending = work.hang_error()
    if ending is not None and work.stage != "plan":
        raise ending
    if ending is not None:
        fields["decided"] = not_planned(str(ending))
    answer = PrepareAnswer(**fields)
    if answer.unchecked and not {"check", "plan"} & {*request.stages}:
        raise AnygaugeError(f"{answer.unchecked}, and this tokenizer needs it")
    return answer


@contextlib.contextmanager
def _on_terminal(quiet: bool) -> Iterator[Show]:
    """Lines on standard error, and one bar for all files that are fetched."""
    from rich import progress

    from anygauge.util.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=console, transient=True, expand=True)
    with contextlib.ExitStack() as drawn:
        task = bar.add_task("", total=None)

        def show(event: Mapping[str, Any]) -> None:
            if quiet:
                return
            if event["event"] == "message":
                console.print(event["text"])
            elif console.can_redraw:
                if not bar.live.is_started:
                    drawn.enter_context(bar)
                name, done, total = event["name"], event["done"], event["total"]
                bar.update(task, description=name, completed=done, total=total)

        yield show


@contextlib.contextmanager
def _start_process(
    request: PrepareRequest, environ: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which is gone afterwards, whatever happens."""
    with tempfile.TemporaryFile() as question:
        question.write(request.model_dump_json().encode())
        question.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "anygauge.launch.prepare_process"],
            stdin=question,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**environ, **ENVIRONMENT, **parent_environment()},
        )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _events(
    process: subprocess.Popen[bytes], work: PrepareWork, turn: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """What the process reports, until it closes its end or this one gives up.

    Raises:
        TimeoutError: nothing came for longer than the limit of its stage.
    """
    assert process.stdout is not None
    descriptor, text, silence = process.stdout.fileno(), b"", _SilenceClock(process.pid)
    while turn():
        if select.select([descriptor], [], [], _TURN_S)[0]:
            new = os.read(descriptor, 2**16)
            if not new:
                return
            silence = _SilenceClock(process.pid)
            *lines, text = (text + new).split(b"\n")
            for line in lines:
                event = json.loads(line)
                work.track(event)
                yield event
        elif silence.seconds() > work.limit_s:
            raise TimeoutError


class _SilenceClock:
    """How long a process has reported nothing; what it waited for a busy processor, and what this
    one was stopped for, does not count."""

    def __init__(self, pid: int) -> None:
        self._pid, self._seconds = pid, 0.0
        self._at, self._sample = time.monotonic(), sample_process(pid)

    def seconds(self) -> float:
        """Call it several times a second."""
        now, sample = time.monotonic(), sample_process(self._pid)
        passed = min(now - self._at, _FROZEN_S)
        if sample is not None and self._sample is not None and sample.state == "R":
            passed = min(passed, sample.cpu_s - self._sample.cpu_s)
        self._at, self._sample = now, sample
        self._seconds += passed
        return self._seconds


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Return how a process ended that has nothing more to report; kill one that does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_END_S)
    process.kill()
    return process.wait()
