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

import contextlib
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NoReturn

from anygauge.config.paths import is_remote
from anygauge.config.resolved import parse_run
from anygauge.config.schema import DataSection, ModelSection, RunFile
from anygauge.data.rows import share_of_memory
from anygauge.interface import AnygaugeError
from anygauge.launch.decision import Decision
from anygauge.launch.memory import looked_at, planned
from anygauge.models.hub import Wanted, fetch, readable_size
from anygauge.models.hub_errors import HubUnreachableError
from anygauge.models.quiet import quiet_libraries
from anygauge.models.tokenizer import load_tokenizer
from anygauge.registry import installed_plugins
from anygauge.training.auto import forms_of
from anygauge.training.run_checks import Findings, RunChecks, nothing
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent
from anygauge.util.schema import Count, Section
from anygauge.util.text import describe

GIB = 2**30
MODEL_LIMIT = 4 * GIB
"""Memory for building a model without its weights, in bytes."""
PLAN_LIMIT = 8 * GIB
"""A plan that needs more has met something that it should not."""


class PrepareRequest(Section):
    """What the process does: what is fetched, and each stage that is asked, in this order.

    Attributes:
        fetch: what is brought from the hub.
        copies: addresses of rows that are copied into the cache (`anygauge.data.addresses`).
        fetched: that is done.
        unreachable_refuses: a hub that does not answer is a refusal, not a fact of the answer.
        stages: others than ``fetch``, as `Stages` has them.
        run: as `run_json` gives it, without its variables, which this process has.
        backend: name of the chosen one.
        id: of this start; see `anygauge.data.prepare`.
        has_files: this machine has the files that the run file names.
        engine: also tell the engine's settings and the run's steps, for a dry run.
        forms: which of `anygauge.training.auto.forms_of` the run may be, if not the one it names.
        cards: what this machine's devices are called; None: nobody has looked yet.
        asked: True: plan also where that is not needed; False: never.
        force: refuse nothing because of a plan.
        first: put so many rows of each source in the cache; None: all.
        model, chat_template, chat_template_kwargs, prompt: what is rendered. Without a prompt, only
            the tokens that end an answer are asked for, of which there are none without a template.
        with_torch: hide nothing.
    """

    fetch: tuple[Wanted, ...] = ()
    copies: tuple[str, ...] = ()
    fetched: bool = False
    unreachable_refuses: bool = True
    stages: tuple[Literal["check", "plan", "rows", "render"], ...] = ()
    run: str = ""
    backend: str = ""
    id: str = ""
    has_files: bool = True
    engine: bool = False
    forms: tuple[Count, ...] = ()
    cards: tuple[str, ...] | None = None
    asked: bool | None = None
    force: bool = False
    first: int | None = None
    model: ModelSection | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    prompt: str | None = None
    with_torch: bool = False

    @property
    def has_network(self) -> bool:
        """Whether its next stage may use it: a fetch, or the rows of a stream."""
        if self.fetches or "rows" not in self.stages:
            return self.fetches
        data = parse_run(self.run).data
        every = {each.path for each in (*data.train_sources, *data.eval_sources)}
        return any(map(is_remote, every - {*self.copies}))

    @property
    def fetches(self) -> bool:
        """Whether something is still to be fetched."""
        return not self.fetched and bool(self.fetch or self.copies)


class PrepareAnswer(Section):
    """What became of a request.

    Attributes:
        left: bytes of weights whose index alone was wanted, and that are not here.
        unreachable: why the hub could not be asked, if that refuses nothing.
        unchecked: why nothing could be checked here, and only ranks will.
        ids: the tokens of the prompt.
        stop_ids: the tokens that end an answer.
    """

    left: int = 0
    unreachable: str = ""
    unchecked: str = ""
    found: Findings = Findings()
    decided: Decision | None = None
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
        self._hide = nothing if request.with_torch else hide_torch

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
                break
            if found.new:
                self._events.message(
                    f"fetched {want.name}: {readable_size(found.new)} in {found.folder}"
                )
            left += found.left
        else:
            self._found(left=left)
        if self._request.copies:
            self._copy(parse_run(self._request.run).data)

    def _copy(self, section: DataSection) -> None:
        """Bring rows of other machines to this one; another run may be at it, and is waited for."""
        from anygauge.data import copy_addresses

        self.enter("data")

        def show(name: str, done: int, total: int) -> None:
            self._events.send("fetching", name=name, done=done, total=total)

        copy_addresses(section, self._request.id, show)

    def run(self) -> None:
        """All that is asked, after a fetch."""
        stages = self._request.stages
        if "check" in stages or "plan" in stages:
            self._check_and_plan(parse_run(self._request.run))
        if "rows" in stages:
            self._rows(parse_run(self._request.run))
        if "render" in stages:
            self._render()

    def _check_and_plan(self, run: RunFile) -> None:
        """Check model and rows, plan the first form of the run that fits, and check it as that."""
        request, registry = self._request, installed_plugins()
        every = forms_of(run, registry, run.launch.nodes * run.launch.devices)
        forms = [every[number] for number in request.forms]
        cards, decided = request.cards, None
        plans, checks = "plan" in request.stages, "check" in request.stages
        if plans and cards is None:
            forms, cards, decided = looked_at(run, registry, request.backend, request.asked)
        if plans and decided is None:
            self._hide = nothing
        run = forms[0] if forms else run
        if checks:
            self._check(run)
        if plans and decided is None:
            self.enter("plan")
            decided = planned(
                run,
                forms,
                registry,
                request.backend,
                cards or (),
                force=request.force,
                begin=self._plan,
            )
        if decided is None:
            return
        self._found(decided=decided)
        if checks and decided.form is not None and every[decided.form] != run:
            self._check(every[decided.form])

    @contextlib.contextmanager
    def _plan(self, subject: str) -> Iterator[None]:
        """No silence, though each form takes its time."""
        self._events.send("planning", subject=subject)
        yield

    def _check(self, run: RunFile) -> None:
        request = self._request
        checks = RunChecks(
            run=run,
            backend=request.backend,
            id=request.id,
            has_files=request.has_files,
            copied=request.copies,
            engine=request.engine,
            log=self._events.message,
            enter=self.enter,
            hide=self._hide,
            rendering=self._rendering,
        )
        self._found(found=checks.check())

    def _rows(self, run: RunFile) -> None:
        """Put a run's rows in the cache."""
        from anygauge.data import Layout, prepare, training_batches

        section, tokenizer, seed = run.data, self._tokenizer(run.model), run.train.seed
        self.enter("data")
        reading = partial(
            prepare,
            section,
            tokenizer,
            seed,
            log=self._events.message,
            rendering=self._rendering,
        )
        reading(run=self._request.id, first=self._request.first)
        if section.streaming:
            streamed = reading().train
            layout = Layout(micro_batch=1, max_length=section.max_length, pad_id=0)
            steps = training_batches(streamed, section, run.train, layout).steps
            self._found(found=Findings(steps=steps))

    def _render(self) -> None:
        """Put a prompt in its chat template."""
        from anygauge.data.template import ChatTemplate, end_of_turn_ids, read_template

        request = self._request
        assert request.model is not None
        tokenizer = self._tokenizer(request.model)
        given, kwargs = read_template(request.chat_template), request.chat_template_kwargs
        if request.prompt is None:
            ends = end_of_turn_ids(tokenizer, given, self._rendering, kwargs=kwargs)
            return self._found(stop_ids=ends)
        template = ChatTemplate(tokenizer, given, self._rendering, kwargs=kwargs)
        template.row = "the prompt"
        self._found(ids=template.question_ids(request.prompt), stop_ids=template.stop_ids())

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
        if request.fetches:
            stages.fetch()
            if request.stages:
                begin_again(request.model_copy(update={"fetched": True}), answers)
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
