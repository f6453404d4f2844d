"""Prepares a run before ranks start: checks model and rows, plans memory.

Settings are checked here, all else in a process of its own; nothing of the run is written yet.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from anygauge.launch.decision import Decision
from anygauge.launch.prepare_call import prepare
from anygauge.models.hub import HubUnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anygauge.config.schema import DataSection, ModelSection, RunFile
    from anygauge.data.formats import Chat
    from anygauge.launch.request import RunRequest
    from anygauge.training.checks import Findings

_PLANNED_THERE = "memory: the job's first machine plans it before ranks start"


def prepare_run(
    request: RunRequest,
    *,
    quiet: bool = False,
    plan: bool | None = None,
    force: bool = False,
    engine: bool = False,
) -> tuple[RunRequest, Findings, Decision]:
    """Check a run as far as this machine can without a device, and plan it; writes nothing of it.

    Args:
        plan: True: also where that is not needed; False: never.
        force: refuse nothing because of a plan.
        engine: for a dry run: also have the engine's settings, and fetch no weights.

    Returns:
        The run with the strategy that `auto` became; what the checks found; what was planned.

    Raises:
        AnygaugeError: what ranks would refuse, or the run cannot fit.
    """
    from anygauge.config.resolved import run_json
    from anygauge.data import addresses
    from anygauge.launch.memory_check import not_planned, without_a_plan
    from anygauge.launch.prepare_request import PrepareRequest
    from anygauge.models.hub import download_requests
    from anygauge.training.auto import forms_of
    from anygauge.training.checks import check_settings
    from anygauge.util.text import format_bytes

    run, job, registry, forms = request.run, request.job, request.registry, request.forms
    remote = request.launcher.remote
    selection = request.selection
    here = selection.probe.available and not remote
    check_settings(run, request.backend, registry, ranks_run_here=here)
    decided: Decision | None
    if remote:
        job = replace(job, plan=plan, force=force)
        request = replace(request, job=job)
        decided = Decision(lines=() if plan is False else (_PLANNED_THERE,))
    else:
        decided = without_a_plan(run, forms, job.strategy_why, registry, selection, plan)
    every = forms_of(run, registry, job.world_size) if forms else []
    asked = PrepareRequest(
        # Where ranks run on other machines, the agents there fetch.
        fetch=() if remote else tuple(download_requests(run.model, weights=not engine)),
        copies=() if remote else tuple(addresses(run.data)),
        unreachable_refuses=not engine,
        stages=("check", "plan") if decided is None else ("check",),
        run=run_json(run.model_copy(update={"environment": {}})),
        backend=job.backend,
        id=job.id,
        has_files=request.launcher.shared_filesystem,
        engine=engine,
        forms=tuple(every.index(form) for form in forms),
        cards=selection.probe.cards,
        force=force,
    )
    # As ranks have it: what the user has set wins over the run file.
    answer = prepare(asked, {**run.environment, **os.environ}, quiet=quiet)
    decided = decided or answer.decided or not_planned(answer.unchecked)
    notes = []
    if answer.unreachable:
        notes.append(f"the run would be refused: {answer.unreachable}")
    if answer.left:
        first = f"a run would first fetch them, {format_bytes(answer.left)}"
        notes.append(f"the weights were not checked: {first}")
    devices, cores = job.launch.devices, len(os.sched_getaffinity(0))
    if devices > cores and not remote:
        notes.append(
            f"--devices {devices}: these ranks share {cores} processor cores and wait for each "
            f"other; {cores} or fewer are usually faster"
        )
    if answer.unchecked:
        notes.append(f"only the ranks will check model and rows: {answer.unchecked}")
    found = replace(answer.found, notes=[*notes, *answer.found.notes])
    return request.with_decision(decided), found, decided


def settings_alone(request: RunRequest) -> tuple[RunRequest, Findings, Decision]:
    """What `prepare_run` returns, of the settings alone: no model and no rows are looked at.

    Raises:
        AnygaugeError: what ranks would refuse of the settings.
    """
    from anygauge.training.checks import Findings, check_settings

    here = request.selection.probe.available and not request.launcher.remote
    check_settings(request.run, request.backend, request.registry, ranks_run_here=here)
    found = Findings(
        notes=["--no-model: neither the model nor the rows were looked at"],
        engine_note="not shown: it depends on the model",
    )
    return without_checks(request), found, Decision()


def without_checks(request: RunRequest) -> RunRequest:
    """A run of which nothing is checked or planned, with the strategy that `auto` is then."""
    from anygauge.launch.memory_check import without_a_plan

    if request.launcher.remote:
        return request
    run, why, selection = request.run, request.job.strategy_why, request.selection
    found = without_a_plan(run, request.forms, why, request.registry, selection, asked=False)
    assert found is not None
    return request.with_decision(found)


def fetch_configuration(run: RunFile) -> None:
    """Have what a plan needs of the run's model; where no hub answers, a copy that is here will do.

    Raises:
        ModelError: what cannot be had, why, and what to do.
    """
    from anygauge.launch.prepare_request import PrepareRequest
    from anygauge.models.hub import CONFIG, copy_of, requests_for_plan

    request = PrepareRequest(fetch=tuple(requests_for_plan(run.model)), unreachable_refuses=False)
    answer = prepare(request, {**run.environment, **os.environ}, quiet=True)
    if answer.unreachable:
        copy = copy_of(run.model.name or "", run.model.revision)
        if copy is None or not (copy / CONFIG).is_file():
            raise HubUnreachableError(answer.unreachable)


def render(
    section: ModelSection, data: DataSection | None, chats: Sequence[Chat] = ()
) -> tuple[list[list[int]], list[int]]:
    """The tokens of chats in their template, each up to its answer, and those that end an answer.

    Args:
        data: of the run, with its chat template; None: the tokenizer's.
        chats: see `PrepareRequest`.

    Raises:
        AnygaugeError: there is no template, or it does not take a chat; or it was ended.
    """
    from anygauge.launch.prepare_request import PrepareRequest

    of_run = {"chat_template", "chat_template_kwargs"}
    template = {} if data is None else data.model_dump(include=of_run)
    asked = PrepareRequest(stages=("render",), model=section, chats=tuple(chats), **template)
    answer = prepare(asked)
    return answer.ids, answer.stop_ids
