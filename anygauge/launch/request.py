"""From a run file and options to a job: shared by the commands that start or describe one."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import Job, LaunchProfile, RunFileError, UsageError
from anygauge.launch.decision import UNDECIDED, Decision
from anygauge.launch.foreign import ALONE

if TYPE_CHECKING:
    from anygauge.config.load import LoadedRun
    from anygauge.config.schema import RunFile
    from anygauge.interface import Backend, LauncherSpec, Plan
    from anygauge.launch.foreign import ForeignLaunch
    from anygauge.registry import Registry, Selection


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What the user asked for, checked and with a backend chosen.

    Attributes:
        profile: what containers need for the backend and the network.
        forms: what strategy ``auto`` may become, the fastest first, which the run has until it is
            known to fit; empty where a strategy is named, or this process does not decide.
    """

    loaded: LoadedRun
    registry: Registry
    selection: Selection
    backend: Backend
    job: Job
    profile: LaunchProfile
    forms: tuple[RunFile, ...] = ()

    @property
    def run(self) -> Any:
        """The run file."""
        return self.loaded.run

    @property
    def launcher(self) -> LauncherSpec:
        """Who starts its ranks."""
        return self.registry.find_launcher(self.run.launch.launcher).spec

    def decided(self, found: Decision) -> RunRequest:
        """With the strategy that `auto` became, and what was planned."""
        from anygauge.config.strategies import default_section
        from anygauge.training.auto import decided_before

        if not self.forms:
            return replace(self, job=found.applied_to(self.job))
        run = self.run.model_copy(update={"strategy": default_section()})
        job = replace(self.job, strategy=run.strategy.name, strategy_why=UNDECIDED)
        job = found.applied_to(job)
        run = decided_before(run, job, self.registry)
        return replace(self, job=job, loaded=replace(self.loaded, run=run))


def read_request(
    path: Path,
    overrides: Sequence[str] | None,
    flags: Mapping[str, Any],
    *,
    need_device: bool,
    foreign: ForeignLaunch | None = None,
) -> RunRequest:
    """Read the run file, choose the backend, and describe the job.

    Args:
        flags: dotted path -> value of a dedicated option; None where it was not given.
        need_device: ranks will be started here, so the device must be there.
        foreign: the launch that this process is a rank of, where that is not anygauge's. Rank 0
            alone chooses the run directory; the others' is a guess.
    """
    from anygauge.config.load import check_paths, load_run_file
    from anygauge.config.resolved import run_json
    from anygauge.data import peek
    from anygauge.launch.memory import forms_of_auto
    from anygauge.launch.run_directory import RENDEZVOUS, RESOLVED, choose_run_directory
    from anygauge.registry import installed_plugins, select_backend
    from anygauge.registry.specs import read_options
    from anygauge.training.auto import AUTO
    from anygauge.training.checks import check_optimizer
    from anygauge.training.strategy import check_batch, check_strategy
    from anygauge.training.trackers.group import check_trackers

    loaded = load_run_file(path, list(overrides or ()), dict(flags))
    if foreign is not None:
        loaded = _as_launched(loaded, foreign)
    run = loaded.run
    registry = installed_plugins()
    provided = registry.find_launcher(run.launch.launcher)
    launcher = provided.spec
    with loaded.placed():  # what the launcher is given; a wrong option need not wait for the model
        read_options(provided, run.launch.options)
    if launcher.shared_filesystem:
        check_paths(loaded)
        peek(run.data, run.train)
    else:
        refuse_secrets(run)
    ranks = run.launch.nodes * run.launch.devices
    if launcher.remote and run.backend == "auto":
        raise RunFileError(
            f"backend: auto looks at this machine, but the {run.launch.launcher} launcher starts "
            "ranks on other machines. Name the backend (--backend)"
        )
    need_device = need_device and not launcher.remote
    check_optimizer(run, need_software=need_device)
    with loaded.placed():
        check_trackers(registry, run, {**os.environ, **run.environment} if need_device else None)
    selection = select_backend(registry, run.backend, need_device=need_device)
    with loaded.placed():
        backend = registry.create_backend(selection.spec.name, run.backend_options)
    here = selection.probe.available and not launcher.remote
    forms: list[RunFile] = []
    why = ""
    if run.strategy.name == AUTO:
        why = UNDECIDED
        if not launcher.remote and foreign is None:
            forms, why = forms_of_auto(run, registry, backend, selection)
        run = forms[0] if forms else run
        loaded = replace(loaded, run=run)
    if not forms:  # each of those was checked
        check_strategy(run, registry, backend, ranks, ranks_run_here=here)
        check_batch(run, registry, ranks)
    folder = (Path(run.output) / run.name).absolute()
    if foreign is None or foreign.rank == 0:
        folder = choose_run_directory(folder, resume=run.checkpoint.resume == "auto")
    job = Job(
        name=run.name,
        run_directory=str(folder),
        run_file=str(folder / RESOLVED),
        backend=selection.spec.name,
        strategy=run.strategy.name,
        strategy_why=why,
        launch=run.launch,
        rendezvous=f"file://{folder / RENDEZVOUS}",
        stop_grace_s=run.checkpoint.grace_s,
        working_directory=str(Path.cwd()) if launcher.shared_filesystem else "",
        id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}",
        token=secrets.token_hex(16),
        takes_over=run.checkpoint.resume == "auto",
        run_text=""
        if launcher.shared_filesystem
        else run_json(run.model_copy(update={"backend": selection.spec.name})),
        prepare=launcher.remote,
        environment=run.environment,
        backend_options=run.backend_options,
    )
    return RunRequest(
        loaded=loaded,
        registry=registry,
        selection=selection,
        backend=backend,
        job=job,
        profile=backend.launch_profile(run.launch.fabric),
        forms=tuple(forms),
    )


def _as_launched(loaded: LoadedRun, foreign: ForeignLaunch) -> LoadedRun:
    """A run with the ranks that there are.

    Raises:
        RunFileError, UsageError: it asks for other ranks, or for what only anygauge's own launchers
            do.
    """
    launch, by = loaded.run.launch, foreign.launcher
    for name, there in (("devices", foreign.devices), ("nodes", foreign.nodes)):
        asked = getattr(launch, name)
        if f"launch.{name}" in loaded.sources and asked != there:
            raise loaded.error(
                f"launch.{name}",
                f"{asked}, but {by} started {foreign.world_size} ranks, {foreign.devices} on each "
                f"of {foreign.nodes} machines: leave the field out, or set it to {there}. To have "
                f"anygauge start the ranks itself: {ALONE}",
            )
    where = loaded.sources.get("launch.launcher")
    if where is not None and (launch.launcher != "local" or where.label.startswith("--launcher")):
        raise loaded.error(
            "launch.launcher",
            f"{launch.launcher} would start ranks, but {by} has already started them: leave the "
            "field out (if the run file sets it: --set launch.launcher=local). To have anygauge "
            f"start the ranks itself: {ALONE}",
        )
    if launch.max_restarts:
        raise loaded.error(
            "launch.max_restarts",
            f"{launch.max_restarts}, but {by} started the ranks, so only {by} can restart them "
            "(torchrun --max-restarts, with --resume auto): set launch.max_restarts to 0",
        )
    if foreign.restarts and loaded.run.checkpoint.resume != "auto":
        raise UsageError(
            f"{by} restarts the ranks after a failure (up to {foreign.restarts} times), and a "
            "restarted run resumes in its own folder only with --resume auto: add it"
        )
    changed = {"launcher": "local", "devices": foreign.devices, "nodes": foreign.nodes}
    run = loaded.run.model_copy(update={"launch": launch.model_copy(update=changed)})
    return replace(loaded, run=run)


def refuse_secrets(run: Any) -> None:
    """A job that is handed to a cluster's service must not carry secrets by value.

    Raises:
        RunFileError: a variable with a secret's name, or a value that holds one, is in it.
    """
    from anygauge.util.hiding import holds_secret, is_secret

    held = {n for n, value in run.environment.items() if is_secret(n) or holds_secret(value)}
    for where, names in (
        ("environment", sorted(held)),
        ("launch.pass_environment", [n for n in run.launch.pass_environment if is_secret(n)]),
    ):
        if names:
            raise RunFileError(
                f"{where}: {names[0]} looks like a secret, but the {run.launch.launcher} launcher "
                "would pass its value to the cluster. Say in launch.options.secrets where the "
                "cluster keeps it"
            )


def rendered(request: RunRequest) -> Plan:
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
    with request.loaded.placed():
        options = read_options(provided, run.launch.options)
        plan = launcher.render(request.job, options, request.profile)
    if plan.folders:
        check_folders(request.loaded, plan.folders, _ADVICE)
    return plan


_ADVICE = (
    " and what is in their image. Mount it (launch.options), or, if the image has it, list its "
    "folder in launch.options.in_image"
)
