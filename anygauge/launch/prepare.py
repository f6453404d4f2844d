"""What is prepared before ranks start: a process of its own fetches, checks, plans and tokenises.

The process (`anygauge.launch.prepare_process`) is bounded in silence and memory, by stage, and what
it imports is gone with it. It also runs the chat templates for commands without a run: a template
comes with a model, and may go on for ever. Here it is started, its progress is passed on, and what
it died of is said.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from anygauge.interface import AnygaugeError, DataError, ModelError
from anygauge.launch.rank_process import sample_process
from anygauge.models.hub_errors import HubUnreachableError
from anygauge.util import errors
from anygauge.util.processes import describe_exit, parent_environment
from anygauge.util.text import size

if TYPE_CHECKING:
    from anygauge.config.schema import DataSection, ModelSection, RunFile
    from anygauge.interface import Job
    from anygauge.launch.memory import Expectation
    from anygauge.launch.prepare_process import Answer, Request
    from anygauge.registry import Registry, Selection
    from anygauge.training.checks import Findings

LIMITS_S = {"fetch": 300.0, "model": 120.0, "data": 1800.0, "plan": 30.0}
"""Silence after which a stage counts as hung. The hub's library itself tries again for a minute.
Tokenising reports from time to time; a digest of a large file, or the wait for another run that
tokenises the same rows, does not. A plan reports nothing: the run starts without it."""
AUTO_LIMIT_S = 120.0
"""For a plan of several strategies."""
RENDERING_LIMIT_S = 60.0
"""For one rendering of a chat template, which takes milliseconds; a second for a thousand turns."""

ENVIRONMENT = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}
"""No threads are made for work that is not there."""

_TURN_S = 0.1
_FROZEN_S = 2.0
_TAIL = 2000
_END_S = 10.0

Show = Callable[[Mapping[str, Any]], None]
"""Takes the events ``message`` (`text`) and ``fetching`` (`name`, `done` and `total` bytes, about
once a second)."""


def ignore(event: Mapping[str, Any]) -> None:
    """Where progress is not shown."""


def always() -> bool:
    """Nothing else to do meanwhile."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run whose ranks may start.

    Attributes:
        run, job: with the strategy that `auto` became, and what was planned.
        found: by the checks.
        expected: by the plan, or without one.
    """

    run: RunFile
    job: Job
    found: Findings
    expected: Expectation


def prepare_run(
    run: RunFile,
    job: Job,
    registry: Registry,
    selection: Selection,
    forms: Sequence[RunFile] = (),
    *,
    show: Show = ignore,
    plan: bool | None = None,
    force: bool = False,
    engine: bool = False,
) -> Prepared:
    """Check a run as far as this machine can without a device, and plan it; writes nothing of it.

    Args:
        forms: of strategy `auto`, the fastest first, which the run has; see `forms_of_auto`.
        plan: True: also where that is not needed; False: never.
        force: refuse nothing because of a plan.
        engine: for a dry run: also have the engine's settings, and fetch no weights.

    Raises:
        AnygaugeError: what ranks would refuse, or the run cannot fit.
    """
    from anygauge.config.resolved import run_json
    from anygauge.launch.memory import not_planned, without_a_plan
    from anygauge.launch.prepare_process import PlanQuestion, Request
    from anygauge.models.hub import readable_size, wanted
    from anygauge.training.checks import Question, check_settings

    spec = registry.find_launcher(run.launch.launcher).spec
    backend = registry.create_backend(selection.spec.name, run.backend_options)
    here = selection.probe.available and not spec.remote
    check_settings(run, backend, registry, ranks_run_here=here)
    texts = [run_json(one.model_copy(update={"environment": {}})) for one in forms or (run,)]
    question = Question(
        run=texts[0],
        backend=job.backend,
        world_size=job.world_size,
        id=job.id,
        has_files=spec.shared_filesystem,
        engine=engine,
    )
    expected = without_a_plan(run, job, registry, selection, plan)
    planned = PlanQuestion(
        forms=tuple(texts),
        backend=job.backend,
        cards=None if spec.remote else tuple(selection.probe.cards),
        force=force,
    )
    request = Request(
        # Where ranks run on other machines, the agents there fetch.
        fetch=() if spec.remote else tuple(wanted(run.model, weights=not engine)),
        unreachable_refuses=not engine,
        check=question,
        plan=planned if expected is None else None,
    )
    # As ranks have it: what the user has set wins over the run file.
    answer = prepare(request, {**run.environment, **os.environ}, show)
    expected = expected or answer.expected or not_planned(answer.unchecked)
    notes = []
    if answer.unreachable:
        notes.append(f"the run would be refused: {answer.unreachable}")
    if answer.left:
        first = f"a run would first fetch them, {readable_size(answer.left)}"
        notes.append(f"the weights were not checked: {first}")
    devices, cores = job.launch.devices, len(os.sched_getaffinity(0))
    if devices > cores and not spec.remote:
        notes.append(
            f"--devices {devices}: these ranks share {cores} processor cores and wait for each "
            f"other; {cores} or fewer are usually faster"
        )
    if answer.unchecked:
        notes.append(f"only the ranks will check model and rows: {answer.unchecked}")
    run, job = expected.applied_to(run, job, forms)
    found = replace(answer.found, notes=[*notes, *answer.found.notes])
    return Prepared(run=run, job=job, found=found, expected=expected)


def render(
    section: ModelSection, data: DataSection | None, prompt: str | None
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt in its chat template, and those that end an answer.

    Args:
        data: of the run, with its chat template; None: the tokenizer's.
        prompt: see `PromptQuestion`.

    Raises:
        AnygaugeError: there is no template, or it does not take the prompt; or it was ended.
    """
    from anygauge.launch.prepare_process import PromptQuestion, Request

    template = {} if data is None else data.model_dump(include=set(_TEMPLATE))
    answer = prepare(Request(render=PromptQuestion(model=section, prompt=prompt, **template)))
    return answer.ids, answer.stop_ids


_TEMPLATE = ("chat_template", "chat_template_kwargs")


def prepare(
    request: Request,
    environ: Mapping[str, str] | None = None,
    show: Show = ignore,
    turn: Callable[[], bool] = always,
) -> Answer:
    """Have a process of its own do what is asked; it is gone afterwards, whatever happens.

    Args:
        environ: of the process; None: this one's.
        turn: called ten times a second meanwhile; False gives up.

    Returns:
        What was found, until this one gave up. Where a plan takes too long, or its process ends,
        the answer says so.

    Raises:
        HubUnreachableError: no answer of the hub could be had.
        AnygaugeError: what the process refuses; or it hung or was killed.
    """
    from anygauge.launch.memory import not_planned
    from anygauge.launch.prepare_process import Answer

    if request.is_empty:
        return Answer()
    work, fields = _Work(request), {}
    with (
        tempfile.TemporaryFile() as output,
        _started(request, os.environ if environ is None else environ, output) as process,
    ):
        ending = None
        try:
            for event in _events(process, work, turn):
                match event["event"]:
                    case "message" | "fetching":
                        show(event)
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
        fields["expected"] = not_planned(str(ending))
    answer = Answer(**fields)
    if answer.unchecked and request.check is None:
        raise AnygaugeError(f"{answer.unchecked}, and this tokenizer needs it")
    return answer


_ERRORS = {**vars(errors), "HubUnreachableError": HubUnreachableError}


@contextlib.contextmanager
def _started(
    request: Request, environ: Mapping[str, str], output: IO[bytes]
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

    def __init__(self, request: Request) -> None:
        self.stage = "fetch" if request.fetches else "model"
        self._request = request
        self._template = self._row = ""  # what is being rendered

    @property
    def limit_s(self) -> float:
        """Of silence."""
        if self._row:
            return RENDERING_LIMIT_S
        plan = self._request.plan
        several = self.stage == "plan" and plan is not None and len(plan.forms) > 1
        return AUTO_LIMIT_S if several else LIMITS_S[self.stage]

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
        if self._request.render is not None:
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
        elif self._request.render is not None:
            what, advice = "loads the tokenizer", ""
        return AnygaugeError(
            f"the process that {what} {how}. There may be too little memory{advice}"
        )

    def _ended_rendering(self, what: str) -> DataError:
        way_out = "or the row, or give another data.chat_template"
        if self._request.render is not None:
            way_out = "or give another --tokenizer (`generate --raw` asks without a template)"
        return DataError(f"{self._template} {what}. Correct the template {way_out}")
