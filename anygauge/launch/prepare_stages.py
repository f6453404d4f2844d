"""What the prepare process does, stage by stage."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from anygauge.config.resolved import parse_run
from anygauge.config.schema import DataSection, ModelSection, RunFile
from anygauge.data.rows import share_of_memory
from anygauge.launch.memory_check import look_at_machine, plan_memory
from anygauge.launch.prepare_request import PrepareAnswer, PrepareRequest
from anygauge.models.hub import HubUnreachableError, fetch
from anygauge.models.source import quiet_libraries
from anygauge.models.tokenizer import load_tokenizer
from anygauge.registry import installed_plugins
from anygauge.training.auto import forms_of
from anygauge.training.checks import Findings
from anygauge.training.run_checks import RunChecks, ignore
from anygauge.util.events import EventWriter
from anygauge.util.text import format_bytes

GIB = 2**30
MODEL_LIMIT = 4 * GIB
"""Memory for building a model without its weights, in bytes."""
PLAN_LIMIT = 8 * GIB
"""A plan that needs more has met something that it should not."""


class Stages:
    """The work of one request, each stage a method, and what it reports.

    Attributes:
        stage: what it is at: ``fetch``, ``model``, ``data`` or ``plan``.
        limit: bytes that this process may have.
    """

    def __init__(self, request: PrepareRequest, events: EventWriter) -> None:
        self._request, self._events = request, events
        self.stage, self.limit = "", 0
        self._hide = ignore if request.with_torch else hide_torch

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
                self._send_answer(unreachable=str(error))
                break
            if found.new:
                new = format_bytes(found.new)
                self._events.message(f"fetched {want.name}: {new} in {found.folder}")
            left += found.left
        else:
            self._send_answer(left=left)
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
        """Run all stages that the request has after the fetch."""
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
            forms, cards, decided = look_at_machine(run, registry, request.backend, request.asked)
        if plans and decided is None:
            self._hide = ignore
        run = forms[0] if forms else run
        if checks:
            self._check(run)
        if plans and decided is None:
            self.enter("plan")
            decided = plan_memory(
                run,
                forms,
                registry,
                request.backend,
                cards or (),
                force=request.force,
                begin=self._report_planning,
            )
        if decided is None:
            return
        self._send_answer(decided=decided)
        if checks and decided.form is not None and every[decided.form] != run:
            self._check(every[decided.form])

    @contextlib.contextmanager
    def _report_planning(self, subject: str) -> Iterator[None]:
        """Break the silence before each form, which takes its time."""
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
        self._send_answer(found=checks.check())

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
            pairs=run.objective_spec.pairs,
        )
        reading(run=self._request.id, first=self._request.first)
        if section.streaming:
            streamed = reading().train
            layout = Layout(micro_batch=1, max_length=section.max_length, pad_id=0)
            steps = training_batches(streamed, section, run.train, layout).steps
            self._send_answer(found=Findings(steps=steps))

    def _render(self) -> None:
        """Put chats in their template."""
        from anygauge.data.template import ChatTemplate, end_of_turn_ids, read_template

        request = self._request
        assert request.model is not None
        tokenizer = self._tokenizer(request.model)
        given, kwargs = read_template(request.chat_template), request.chat_template_kwargs
        if not request.chats:
            ends = end_of_turn_ids(tokenizer, given, self._rendering, kwargs=kwargs)
            return self._send_answer(stop_ids=ends)
        template = ChatTemplate(tokenizer, given, self._rendering, kwargs=kwargs)
        ids = [template.question_ids(chat) for chat in request.chats]
        self._send_answer(ids=ids, stop_ids=template.stop_ids())

    def _tokenizer(self, section: ModelSection) -> Any:
        self.enter("model")
        self._hide()
        quiet_libraries()
        return load_tokenizer(section)

    def _rendering(self, template: str, row: str) -> None:
        """See `anygauge.data.template.Rendering`."""
        self._events.send("rendering", template=template, row=row)

    def _send_answer(self, **fields: Any) -> None:
        answer = PrepareAnswer(**fields).model_dump(mode="json", include=set(fields))
        self._events.send("found", fields=answer)


def hide_torch() -> None:
    """Have this process run as if torch were not installed, by Python's way to forbid an import."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def bound_memory(limit: int) -> int:
    """Let this process have so many bytes, or all that it may have if that is less; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    return limit
