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

from anygauge.interface import AnygaugeError, DataError
from anygauge.launch.decision import Decision
from anygauge.launch.watchdog import sample_process
from anygauge.models.hub_errors import HubUnreachableError
from anygauge.util import errors
from anygauge.util.processes import describe_exit, parent_environment
from anygauge.util.text import size

if TYPE_CHECKING:
    from anygauge.interface import Job
    from anygauge.launch.prepare_process import PrepareAnswer, PrepareRequest

LIMITS_S = {"fetch": 300.0, "model": 120.0, "data": 1800.0, "plan": 30.0}
"""Silence after which a stage counts as hung. The hub's library itself tries again for a minute.
Tokenising reports from time to time; a digest of a large file, or the wait for another run that
tokenises the same rows, does not. Without a plan the run starts all the same."""
RENDERING_LIMIT_S = 60.0
"""For one rendering of a chat template, which takes milliseconds; a second for a thousand turns."""

ENVIRONMENT = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}
"""No threads are made for work that is not there."""

_TURN_S = 0.1
_PROGRESS_S = 30.0
_FROZEN_S = 2.0
_TAIL = 2000
_END_S = 10.0

Show = Callable[[Mapping[str, Any]], None]
"""Takes the events ``message`` (`text`) and ``fetching`` (`name`, `done` and `total` bytes, about
once a second)."""


def always() -> bool:
    """Nothing else to do meanwhile."""
    return True


def prepare_here(
    job: Job,
    environment: Mapping[str, str],
    where: str,
    log: Callable[[str], None],
    turn: Callable[[], bool] = always,
    *,
    check: bool,
    plan: bool,
) -> Decision:
    """Prepare a run on this machine, where ranks will run: fetch its model.

    Args:
        where: a prefix for each line.
        log: takes lines: what is fetched, and from time to time how much of it.
        turn: called again and again meanwhile; False gives up.
        check: also check model and rows, and put the rows' tokens in the cache.
        plan: also decide for all machines what strategy `auto` is, and plan memory.

    Raises:
        AnygaugeError: the model cannot be fetched, or what ranks would refuse.
    """
    from anygauge.config.resolved import read_run, run_json
    from anygauge.data import addresses
    from anygauge.launch.prepare_process import PrepareRequest
    from anygauge.models.hub import wanted

    logged = time.monotonic()

    def show(event: Mapping[str, Any]) -> None:
        nonlocal logged
        if event["event"] == "message":
            log(where + event["text"])
        elif time.monotonic() - logged > _PROGRESS_S:
            logged = time.monotonic()
            share = event["done"] / max(1, event["total"])
            log(f"{where}{event['name']}: {share:.0%} of {event['total'] / 1e9:.1f} GB")

    try:
        run = read_run(job.resolved_run)
        request = PrepareRequest(
            fetch=tuple(wanted(run.model)),
            copies=tuple(addresses(run.data)),
            stages=(*(("check",) if check else ()), *(("plan",) if plan else ())),
            run=run_json(run.model_copy(update={"environment": {}})),
            backend=job.backend,
            id=job.id,
            asked=job.plan,
            force=job.force,
        )
        answer = prepare(request, environment, show=show, turn=turn)
    except AnygaugeError as error:
        raise type(error)(f"{where}{error}") from None
    decided = answer.decided or Decision()
    for note in (*answer.found.notes, *filter(None, [decided.note])):
        log(f"{where}note: {note}")
    for line in decided.lines:
        log(line)
    return decided


def prepare(
    request: PrepareRequest,
    environ: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
    show: Show | None = None,
    turn: Callable[[], bool] = always,
) -> PrepareAnswer:
    """Have a process of its own do what is asked; it is gone afterwards, whatever happens.

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
    from anygauge.launch.memory import not_planned
    from anygauge.launch.prepare_process import PrepareAnswer

    if not (request.fetches or request.stages):
        return PrepareAnswer()
    work = _Work(request)
    fields: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile() as output,
        _on_terminal(quiet) if show is None else contextlib.nullcontext(show) as shown,
        _started(request, os.environ if environ is None else environ, output) as process,
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
                        raise _ERRORS.get(event["error"], AnygaugeError)(event["message"])
                    case "out_of_memory":
                        ending = work.out_of_memory(event["limit"])
                        break
                    case "done":
                        break
            else:
                if turn():
                    ending = work.broken(_ended(process), output)
        except TimeoutError:
            ending = work.hung()
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
            elif console.draws:
                if not bar.live.is_started:
                    drawn.enter_context(bar)
                name, done, total = event["name"], event["done"], event["total"]
                bar.update(task, description=name, completed=done, total=total)

        yield show


_ERRORS = {**vars(errors), "HubUnreachableError": HubUnreachableError}


@contextlib.contextmanager
def _started(
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
    process: subprocess.Popen[bytes], work: _Work, turn: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """What the process reports, until it closes its end or this one gives up.

    Raises:
        TimeoutError: nothing came for longer than the limit of its stage.
    """
    assert process.stdout is not None
    descriptor, text, silence = process.stdout.fileno(), b"", _Silence(process.pid)
    while turn():
        if select.select([descriptor], [], [], _TURN_S)[0]:
            new = os.read(descriptor, 2**16)
            if not new:
                return
            silence = _Silence(process.pid)
            *lines, text = (text + new).split(b"\n")
            for line in lines:
                event = json.loads(line)
                work.note(event)
                yield event
        elif silence.seconds() > work.limit_s:
            raise TimeoutError


class _Silence:
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


def _ended(process: subprocess.Popen[bytes]) -> int:
    """How a process ended that has nothing more to say; one that does not end is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_END_S)
    process.kill()
    return process.wait()


class _Work:
    """What the process is at; and what to say of one that was ended there.

    Attributes:
        stage: see `anygauge.launch.prepare_process.Stages`.
    """

    def __init__(self, request: PrepareRequest) -> None:
        self.stage = "fetch" if request.fetches else "model"
        self._request = request
        self._template = self._row = ""  # what is being rendered

    @property
    def limit_s(self) -> float:
        """Of silence."""
        if self._row:
            return RENDERING_LIMIT_S
        return LIMITS_S[self.stage]

    def note(self, event: Mapping[str, Any]) -> None:
        """Follow the process by its events."""
        if event["event"] == "stage":
            self.stage = event["name"]
        elif event["event"] == "rendering":
            self._template, self._row = event["template"], event["row"]

    def hung(self) -> AnygaugeError:
        """Nothing came for longer than it may."""
        limit = f"{self.limit_s:.0f} s"
        if self._row:
            return self._ended_rendering(
                f"has not rendered {self._row} within {limit}, and may loop for ever"
            )
        if self.stage == "fetch":
            return HubUnreachableError(
                f"nothing arrived from the hub for {limit}: check the network and the disk of "
                "HF_HOME; complete files are kept"
            )
        if self.stage == "plan":
            return AnygaugeError(
                f"a plan takes longer than {limit}; `anygauge plan RUN.yaml` waits for it"
            )
        if "render" in self._request.stages:
            return AnygaugeError(
                f"the tokenizer has not been loaded within {limit}. Look at the disk that holds it"
            )
        return AnygaugeError(
            f"the checks before the run have hung: no progress for {limit} on the run file's "
            f"'{self.stage}' section. Look at that section, at regular expressions for names of "
            "layers or weights, and at the disks that hold the paths in it"
        )

    def out_of_memory(self, limit: int) -> AnygaugeError:
        """It needed more than so many bytes."""
        if self._row:
            return self._ended_rendering(f"took more than {size(limit)} to render {self._row}")
        return AnygaugeError(f"out of memory: the process may have {size(limit)}")

    def broken(self, code: int, output: IO[bytes]) -> AnygaugeError:
        """It ended without an answer; `output` is what it printed."""
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - _TAIL))
        lines = output.read().decode(errors="replace").strip().splitlines()
        how = f"ended with {describe_exit(code)}" + (f": {lines[-1].strip()}" if lines else "")
        if self._row:
            return self._ended_rendering(
                f"was to render {self._row}, and its process {how}. There may be too little memory"
            )
        if self.stage == "fetch":
            return HubUnreachableError(f"fetching the model {how}")
        what = f"checks the run file's '{self.stage}' section before the run"
        advice = "; the run would fail in the same way"
        if self.stage == "plan":
            what = "plans"
            advice = "; a smaller data.max_length or train.micro_batch_size needs less"
        elif "render" in self._request.stages:
            what, advice = "loads the tokenizer", ""
        return AnygaugeError(
            f"the process that {what} {how}. There may be too little memory{advice}"
        )

    def _ended_rendering(self, what: str) -> DataError:
        way_out = "or the row, or give another data.chat_template"
        if "render" in self._request.stages:
            way_out = "or give another --tokenizer (`generate --raw` asks without a template)"
        return DataError(f"{self._template} {what}. Correct the template {way_out}")
