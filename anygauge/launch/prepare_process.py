"""The process that prepares a run before its ranks start:
``python -m anygauge.launch.prepare_process``.

It reads a `PrepareRequest` from standard input and answers with events on standard output;
`anygauge.launch.prepare_call` starts it and says what it died of. Its stages are fetch (a model of
the hub), check (model and rows; these are then in the cache), plan (memory), and for commands
without a run rows and render: chat templates are run nowhere else. No device is opened.

The stage fetch alone has the network, and rows of other machines. What asks no network must know
it before the hub's library is imported, so after a fetch the process executes itself again.

torch alone takes longer to import than all else does here, and the model library imports much of it
for a configuration. So it is hidden from that library, unless the model itself must be built or a
plan is made; where only that explains an error, the process executes itself again with torch.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import traceback
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NoReturn

from anygauge.config.paths import is_remote
from anygauge.config.resolved import parse_run, run_json
from anygauge.config.schema import ModelSection
from anygauge.data.rows import share_of_memory
from anygauge.interface import AnygaugeError
from anygauge.launch.memory import Expectation, PlanQuestion, planned
from anygauge.models.hub import Wanted, fetch, readable_size
from anygauge.models.hub_errors import HubUnreachableError
from anygauge.models.quiet import quiet_libraries
from anygauge.models.tokenizer import load_tokenizer
from anygauge.training.checks import Findings, Question, check_run, nothing
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent
from anygauge.util.schema import Section
from anygauge.util.text import describe

GIB = 2**30
MODEL_LIMIT = 4 * GIB
"""Memory for building a model without its weights, in bytes."""
PLAN_LIMIT = 8 * GIB
"""A plan that needs more has met something that it should not."""


class RowsQuestion(Section):
    """Rows to put in the cache.

    Attributes:
        run: as `run_json` gives it.
        id, first: see `anygauge.data.prepare`.
    """

    run: str
    id: str
    first: int | None = None

    @property
    def are_remote(self) -> bool:
        """Whether some are read over the network."""
        data = parse_run(self.run).data
        return any(is_remote(each.path) for each in (*data.train_sources, *data.eval_sources))


class PromptQuestion(Section):
    """A prompt to put in its chat template.

    Attributes:
        chat_template, chat_template_kwargs: of the data section; None: the tokenizer's.
        prompt: None asks only for the tokens that end an answer, of which there are none without a
            template.
    """

    model: ModelSection
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    prompt: str | None = None


class PrepareRequest(Section):
    """What the process does: all that is not empty, in this order.

    Attributes:
        fetch: what is brought from the hub.
        unreachable_refuses: a hub that does not answer is a refusal, not a fact of the answer.
        with_torch: hide nothing.
    """

    fetch: tuple[Wanted, ...] = ()
    unreachable_refuses: bool = True
    check: Question | None = None
    plan: PlanQuestion | None = None
    rows: RowsQuestion | None = None
    render: PromptQuestion | None = None
    with_torch: bool = False

    @property
    def has_network(self) -> bool:
        """Whether its next stage may use it: a fetch, or rows of other machines."""
        return bool(self.fetch) or (self.rows is not None and self.rows.are_remote)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked."""
        return not (self.fetch or self.check or self.plan or self.rows or self.render)


class PrepareAnswer(Section):
    """What became of a request.

    Attributes:
        left: bytes of weights whose index alone was wanted, and that are not here.
        unreachable: why the hub could not be asked, if that refuses nothing.
        unchecked: why nothing could be checked here, and only ranks will.
        steps: of a run whose rows are streamed.
        ids: the tokens of the prompt.
        stop_ids: the tokens that end an answer.
    """

    left: int = 0
    unreachable: str = ""
    unchecked: str = ""
    found: Findings = Findings()
    expected: Expectation | None = None
    steps: int | None = None
    ids: list[int] = []
    stop_ids: list[int] = []


class Stages:
    """The work of one request, each stage a method, and what it reports.

    Attributes:
        stage: what it is at: ``fetch``, ``model``, ``data`` or ``plan``.
        limit: bytes that this process may have.
    """

    def __init__(self, request: PrepareRequest, events: EventWriter) -> None:
        self._request, self._events = request, events
        self.stage, self.limit = "", 0
        plain = request.with_torch or request.plan is not None
        self._hide = nothing if plain else hide_torch

    def enter(self, stage: str) -> None:
        """Begin a stage, with its own limit of memory."""
        self.stage = stage
        self._events.send("stage", name=stage)
        if stage != "fetch":
            limits = {"model": MODEL_LIMIT, "plan": PLAN_LIMIT}
            self.limit = bound_memory(limits.get(stage) or share_of_memory(1))

    def fetch(self) -> None:
        """Bring what is wanted of the hub to this machine."""
        self.enter("fetch")
        left = 0
        for want in self._request.fetch:

            def show(done: int, total: int, name: str = want.name) -> None:
                self._events.send("fetching", name=name, done=done, total=total)

            try:
                found = fetch(want, show, self._events.message)
            except HubUnreachableError as error:
                if self._request.unreachable_refuses:
                    raise
                self._found(unreachable=str(error))
                return
            if found.new:
                self._events.message(
                    f"fetched {want.name}: {readable_size(found.new)} in {found.folder}"
                )
            left += found.left
        self._found(left=left)

    def check(self, question: Question) -> None:
        """Check model and rows."""
        run, events = parse_run(question.run), self._events
        found = check_run(question, run, events.message, self.enter, self._hide, self._rendering)
        self._found(found=found)

    def plan(self, question: PlanQuestion) -> int | None:
        """Plan the first form that fits; returns which it is."""
        self.enter("plan")
        expected = planned(question)
        self._found(expected=expected)
        return expected.form

    def rows(self, question: RowsQuestion) -> None:
        """Put a run's rows in the cache."""
        from anygauge.data import Layout, prepare, training_batches

        run, log = parse_run(question.run), self._events.message
        section, seed = run.data, run.train.seed
        tokenizer = self._tokenizer(run.model)
        self.enter("data")
        prepare(
            section,
            tokenizer,
            seed,
            log=log,
            run=question.id,
            first=question.first,
            rendering=self._rendering,
        )
        if run.data.streaming:
            streamed = prepare(section, tokenizer, seed, log=log, rendering=self._rendering).train
            layout = Layout(micro_batch=1, max_length=section.max_length, pad_id=0)
            self._found(steps=training_batches(streamed, section, run.train, layout).steps)

    def render(self, question: PromptQuestion) -> None:
        """Put a prompt in its chat template."""
        from anygauge.data.template import ChatTemplate, end_of_turn_ids, read_template

        tokenizer = self._tokenizer(question.model)
        given, kwargs = read_template(question.chat_template), question.chat_template_kwargs
        if question.prompt is None:
            ends = end_of_turn_ids(tokenizer, given, self._rendering, kwargs=kwargs)
            return self._found(stop_ids=ends)
        template = ChatTemplate(tokenizer, given, self._rendering, kwargs=kwargs)
        template.row = "the prompt"
        self._found(ids=template.question_ids(question.prompt), stop_ids=template.stop_ids())

    def run(self) -> None:
        """All that is asked, after a fetch."""
        request = self._request
        if request.check is not None:
            self.check(request.check)
        if request.plan is not None:
            form = self.plan(request.plan)
            if form and request.check is not None:  # the run was checked as its first form
                self.check(replace(request.check, run=run_json(request.plan.forms[form])))
        if request.rows is not None:
            self.rows(request.rows)
        if request.render is not None:
            self.render(request.render)

    def _tokenizer(self, section: ModelSection) -> Any:
        self.enter("model")
        self._hide()
        quiet_libraries()
        return load_tokenizer(section)

    def _rendering(self, template: str, row: str) -> None:
        """See `anygauge.data.template.Rendering`."""
        self._events.send("rendering", template=template, row=row)

    def _found(self, **fields: Any) -> None:
        answer = PrepareAnswer(**fields).model_dump(mode="json", include=set(fields))
        self._events.send("found", fields=answer)


def hide_torch() -> None:
    """Have this process run as if torch were not installed, by Python's way to forbid an import."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def misses_torch(error: BaseException) -> bool:
    """Whether an error may be one only because torch is hidden."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ImportError) or "torch" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def bound_memory(limit: int) -> int:
    """Let this process have so many bytes, or all that it may have if that is less; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    return limit


def failed(error: Exception, stage: str) -> dict[str, Any]:
    """The event that an error comes to: a refusal, unless torch is not installed."""
    if isinstance(error, AnygaugeError):
        # The other end knows the kinds that all packages share, with their exit status.
        shared = AnygaugeError.__module__
        kind = next(
            each.__name__
            for each in type(error).__mro__
            if each is HubUnreachableError or each.__module__ == shared
        )
        return {"event": "refused", "error": kind, "message": str(error)}
    if find_spec("torch") is None and misses_torch(error):
        return {"event": "found", "fields": {"unchecked": "torch is not installed here"}}
    traceback.print_exc()
    kind, what = ("AnygaugeError", "the checks before the run failed")
    if stage == "fetch":
        kind, what = "ModelError", "fetching the model failed"
    return {"event": "refused", "error": kind, "message": f"{what}: {describe(error)}"}


def begin_again(request: PrepareRequest, answers: int) -> NoReturn:
    """Replace this process by one that has another request.

    Args:
        answers: descriptor that events go to.
    """
    with tempfile.TemporaryFile() as file:
        file.write(request.model_dump_json().encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.dup2(answers, 1)
        os.execv(sys.executable, [sys.executable, "-m", "anygauge.launch.prepare_process"])


def main() -> int:
    """PrepareAnswer one request; returns the exit status, which is 0 if an answer was given."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    request = PrepareRequest.model_validate_json(sys.stdin.buffer.read())
    # What libraries print must not stand among the events.
    answers = os.dup(1)
    events = EventWriter(answers)
    os.dup2(2, 1)
    if not request.has_network:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    stages = Stages(request, events)
    try:
        if request.fetch:
            stages.fetch()
            rest = request.model_copy(update={"fetch": ()})
            if not rest.is_empty:
                begin_again(rest, answers)
        stages.run()
    except MemoryError:
        events.send("out_of_memory", limit=stages.limit)
    except Exception as error:
        if sys.modules.get("torch", error) is None and misses_torch(error):
            begin_again(request.model_copy(update={"with_torch": True}), answers)
        events.send(**failed(error, stages.stage))
    events.send("done")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here, nor a download that still runs
