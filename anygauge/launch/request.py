"""Turns a run file and options into a job, for the commands that start or describe one."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import Job, UsageError
from anygauge.launch.decision import UNDECIDED, Decision
from anygauge.launch.foreign import START_REMEDY

if TYPE_CHECKING:
    from anygauge.config.load import RunSource
    from anygauge.config.schema import RunFile
    from anygauge.interface import Backend, LauncherSpec, Plan
    from anygauge.launch.foreign import ForeignLaunch
    from anygauge.registry import Registry, Selection


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """The run that the user requests, checked and with a backend chosen.

    Attributes:
        forms: what strategy ``auto`` may become, the fastest first, which the run has until it is
            known to fit; empty where a strategy is named, or this process does not decide.
    """

    run: RunFile
    registry: Registry
    selection: Selection
    backend: Backend
    job: Job
    forms: tuple[RunFile, ...] = ()

    @property
    def launcher(self) -> LauncherSpec:
        """Who starts its ranks."""
        return self.registry.find_launcher(self.run.launch.launcher).spec

    def with_decision(self, found: Decision) -> RunRequest:
        """Return the request with the strategy that `auto` became, and the plan's results."""
        from anygauge.config.strategies import StrategySection
        from anygauge.training.auto import decided_before

        if not self.forms:
            return replace(self, job=found.applied_to(self.job))
        run = self.run.model_copy(update={"strategy": StrategySection.of_default()})
        job = replace(self.job, strategy=run.strategy.name, strategy_why=UNDECIDED)
        job = found.applied_to(job)
        return replace(self, job=job, run=decided_before(run, job, self.registry))


def read_request(
    source: RunSource,
    overrides: Sequence[str] | None,
    flags: Mapping[str, Any],
    *,
    need_device: bool,
    foreign: ForeignLaunch | None = None,
    look_at_files: bool = True,
) -> RunRequest:
    """Read the run file, choose the backend, and describe the job.

    Args:
        source: see `load_run_file`.
        flags: dotted path -> value of a dedicated option; None where it was not given.
        need_device: ranks will be started here, so the device must be there.
        foreign: the launch that this process is a rank of, where that is not anygauge's. Rank 0
            alone chooses the run directory; the others' is a guess.
        look_at_files: also look for model and rows, and at the first of these.
    """
    from anygauge.config.load import load_run_file
    from anygauge.launch.memory_check import forms_of_auto
    from anygauge.registry import installed_plugins, select_backend
    from anygauge.training.auto import AUTO
    from anygauge.training.build_strategy import check_batch, check_strategy

    run = load_run_file(source, list(overrides or ()), flags)
    if foreign is not None:
        run = _as_launched(run, foreign)
    registry = installed_plugins()
    remote = registry.find_launcher(run.launch.launcher).spec.remote
    need_device = need_device and not remote
    _check_without_backend(run, registry, need_device=need_device, look_at_files=look_at_files)
    selection = select_backend(registry, run.backend, need_device=need_device)
    with run.locate_errors():
        backend = registry.create_backend(selection.spec.name, run.backend_options)
    forms: list[RunFile] = []
    why = ""
    if run.strategy.name == AUTO:
        why = UNDECIDED
        if not remote and foreign is None:
            forms, why = forms_of_auto(run, registry, backend, selection)
    if forms:
        run = forms[0]  # each of these was checked
    else:
        ranks, here = run.launch.nodes * run.launch.devices, selection.probe.available
        check_strategy(run, registry, backend, ranks, ranks_run_here=here and not remote)
        check_batch(run, registry, ranks)
    return RunRequest(
        run=run,
        registry=registry,
        selection=selection,
        backend=backend,
        job=_make_job(run, registry, selection.spec.name, foreign, why),
        forms=tuple(forms),
    )


def _check_without_backend(
    run: RunFile, registry: Registry, *, need_device: bool, look_at_files: bool
) -> None:
    """Check what needs no backend: options, paths, data, secrets, optimizer, trackers."""
    from anygauge.config.load import check_paths
    from anygauge.data import peek
    from anygauge.registry.specs import read_options
    from anygauge.training.checks import check_optimizer
    from anygauge.training.trackers.group import check_trackers

    launcher = registry.find_launcher(run.launch.launcher)
    with run.locate_errors():
        read_options(launcher, run.launch.options)
    if not launcher.spec.shared_filesystem:
        _refuse_secrets(run)
    elif look_at_files:
        check_paths(run)
        peek(run.data, run.train, pairs=run.objective_spec.pairs)
    if launcher.spec.remote and run.backend == "auto":
        raise run.error(
            "backend",
            f"auto looks at this machine, but the {run.launch.launcher} launcher starts ranks on "
            "other machines. Name the backend (--backend)",
        )
    check_optimizer(run, registry, need_software=need_device)
    with run.locate_errors():
        check_trackers(registry, run, {**os.environ, **run.environment} if need_device else None)


def _make_job(
    run: RunFile, registry: Registry, backend: str, foreign: ForeignLaunch | None, why: str
) -> Job:
    """The run's job; `why` says why it has its strategy."""
    from anygauge.config.resolved import run_json
    from anygauge.launch.run_directory import RENDEZVOUS, RESOLVED, choose_run_directory

    launcher = registry.find_launcher(run.launch.launcher).spec
    shared, resumes = launcher.shared_filesystem, run.checkpoint.resume == "auto"
    folder = (Path(run.output) / run.name).absolute()
    if foreign is None or foreign.rank == 0:
        folder = choose_run_directory(folder, resume=resumes)
    return Job(
        name=run.name,
        run_directory=str(folder),
        run_file=str(folder / RESOLVED),
        backend=backend,
        strategy=run.strategy.name,
        strategy_why=why,
        launch=run.launch,
        rendezvous=f"file://{folder / RENDEZVOUS}",
        stop_grace_s=run.checkpoint.grace_s,
        working_directory=str(Path.cwd()) if shared else "",
        id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}",
        token=secrets.token_hex(16),
        takes_over=resumes,
        run_text="" if shared else run_json(run.model_copy(update={"backend": backend})),
        prepare=launcher.remote,
        deterministic=run.train.deterministic,
        environment=run.environment,
        backend_options=run.backend_options,
    )


def _as_launched(run: RunFile, foreign: ForeignLaunch) -> RunFile:
    """The run with the ranks that there are; one that asks for others, or for what only anygauge's
    own launchers do, is refused.
    """
    launch, by = run.launch, foreign.launcher
    for name, there in (("devices", foreign.devices), ("nodes", foreign.nodes)):
        asked = getattr(launch, name)
        if run.has_value(f"launch.{name}") and asked != there:
            raise run.error(
                f"launch.{name}",
                f"{asked}, but {by} started {foreign.world_size} ranks, {foreign.devices} on each "
                f"of {foreign.nodes} machines: leave the field out, or set it to {there}. To have "
                f"anygauge start the ranks itself: {START_REMEDY}",
            )
    by_option = run.origin("launch.launcher").label.startswith("--launcher")
    if run.has_value("launch.launcher") and (launch.launcher != "local" or by_option):
        raise run.error(
            "launch.launcher",
            f"{launch.launcher} would start ranks, but {by} has already started them: leave the "
            "field out (if the run file sets it: --set launch.launcher=local). To have anygauge "
            f"start the ranks itself: {START_REMEDY}",
        )
    if launch.max_restarts:
        raise run.error(
            "launch.max_restarts",
            f"{launch.max_restarts}, but {by} started the ranks, so only {by} can restart them "
            "(torchrun --max-restarts, with --resume auto): set launch.max_restarts to 0",
        )
    if foreign.restarts and run.checkpoint.resume != "auto":
        raise UsageError(
            f"{by} restarts the ranks after a failure (up to {foreign.restarts} times), and a "
            "restarted run resumes in its own folder only with --resume auto: add it"
        )
    changed = {"launcher": "local", "devices": foreign.devices, "nodes": foreign.nodes}
    return run.model_copy(update={"launch": launch.model_copy(update=changed)})


def _refuse_secrets(run: RunFile) -> None:
    """A job that is handed to a cluster's service must not carry secrets by value."""
    from anygauge.util.hiding import holds_secret, is_secret

    held = {n for n, value in run.environment.items() if is_secret(n) or holds_secret(value)}
    for where, names in (
        ("environment", sorted(held)),
        ("launch.pass_environment", [n for n in run.launch.pass_environment if is_secret(n)]),
    ):
        if names:
            raise run.error(
                where,
                f"{names[0]} looks like a secret, but the {run.launch.launcher} launcher would "
                "pass its value to the cluster. Say in launch.options.secrets where the cluster "
                "keeps it",
            )


def render_plan(request: RunRequest) -> Plan:
    """What the launcher would do.

    Raises:
        RunFileError: an option of the launcher is wrong, or a path of the run file leads nowhere on
            the machines of the job.
    """
    from anygauge.config.load import check_folders
    from anygauge.registry.specs import read_options

    run = request.run
    provided = request.registry.find_launcher(run.launch.launcher)
    launcher = request.registry.launcher(run.launch.launcher)()
    profile = request.backend.launch_profile(run.launch.fabric)
    with run.locate_errors():
        options = read_options(provided, run.launch.options)
        plan = launcher.render(request.job, options, profile)
    if plan.folders:
        advice = (
            " and what is in their image. Mount it (launch.options), or, if the image has it, list "
            "its folder in launch.options.in_image"
        )
        check_folders(run, plan.folders, advice)
    return plan
