"""What ``anygauge train --dry-run`` shows: everything that is settled before a device is opened."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.cli.env import print_environment, rank_environments
from anygauge.cli.listings import describe_launcher
from anygauge.data import accumulation
from anygauge.data.cache import cache_folder
from anygauge.interface import ABILITIES, NotAvailableError
from anygauge.kernels.choose import kernels_of_run
from anygauge.launch.prepare import prepare_run, settings_alone
from anygauge.launch.rank_start import rank_numbers
from anygauge.launch.request import RunRequest, render_plan
from anygauge.launch.submit import resume_target
from anygauge.training.auto import AUTO
from anygauge.training.build_strategy import share_of
from anygauge.training.schedule import learning_rate, warmup_steps
from anygauge.util.console import Console
from anygauge.util.files import write_text

if TYPE_CHECKING:
    from anygauge.launch.decision import Decision
    from anygauge.training.checks import Findings


SHOWN_PROCESSES = 32
SHOWN_RANKS = 16
"""Of a machine with more, the first so many and the last are shown."""


def show_dry_run(
    request: RunRequest, *, plan: bool | None = None, force: bool = False, model: bool = True
) -> None:
    """Check and print the run; starts nothing, opens no device, writes to `data.cache` alone.

    Args:
        plan, force: as for a run.
        model: also look at model and rows; else only at what the run file and this machine say.

    Raises:
        AnygaugeError: what the run's ranks would refuse.
    """
    console = Console()
    _, finished = resume_target(request)
    if finished is not None:
        console.print(finished.describe())
        return
    if model:
        request, found, expected = prepare_run(request, engine=True, plan=plan, force=force)
    else:
        request, found, expected = settings_alone(request)
    job, run = request.job, request.run
    why = f" ({job.strategy_why})" if job.strategy_why else ""
    console.print(f"Run {job.name}: would write {job.run_directory}", style="bold")
    console.print(
        f"  backend {job.backend}, strategy {job.strategy}{why}, {job.launch.nodes} x "
        f"{job.launch.devices} ranks, launcher {run.launch.launcher}"
    )
    for name, reason in request.selection.rejected if run.backend == AUTO else ():
        console.print(f"  not {name}: {reason}")
    remote = request.launcher.remote
    if not remote and not request.selection.probe.available:
        console.print(
            f"  ranks cannot start on this machine: {request.selection.probe.reason}",
            style="yellow",
        )
    _show_checks(console, found, expected)
    console.print("\n[bold]Training[/bold]", markup=True)
    for line in _training_lines(request, found):
        console.print(f"  {line}")
    title = "\n[bold]Environment[/bold] of each rank, decided before torch is imported"
    console.print(title, markup=True)
    if remote:
        console.print("  as on this machine; the job's machines decide their own")
    devices = job.launch.devices
    ranks = dict.fromkeys([*range(min(devices, SHOWN_RANKS)), devices - 1])
    if len(ranks) < devices:
        console.print(f"  of ranks 0 to {SHOWN_RANKS - 1} and {devices - 1} of a machine")
    print_environment(console, rank_environments(request.registry, job, ranks))
    console.print("\n[bold]Engine configuration[/bold]", markup=True)
    _show_engine(console, request, found)
    _show_kernels(console, request)
    _show_plan(console, request)
    who = "each agent" if remote else "the command"
    console.print(f"  {who} starts {job.launch.devices}: python -m anygauge.launch.rank")
    first, last = (
        rank_numbers(job, node, local)
        for node, local in ((0, 0), (job.launch.nodes - 1, job.launch.devices - 1))
    )
    numbers = (
        f"{name}={value}" if value == last[name] else f"{name}={value}..{last[name]}"
        for name, value in first.items()
    )
    console.print(f"    with {' '.join(numbers)}")


def _show_plan(console: Console, request: RunRequest) -> None:
    """What the launcher would do, and what it was tested on."""
    # The token by which agents know each other is drawn at submission.
    plan = render_plan(replace(request, job=replace(request.job, id="", token="")))
    spec = request.launcher
    console.print("\n[bold]Processes[/bold]", markup=True)
    about = describe_launcher(spec)
    console.print(f"  launcher {spec.name}; tested: {about['tested_on']} ({about['proof']})")
    for ability in about["can"]:
        console.print(f"    a job {ABILITIES[ability]}")
    for file in plan.files:
        console.print(f"  writes {file.path}")
        # Files for nobody else hold values of variables.
        if not spec.shared_filesystem and file.mode & 0o077:
            console.print(textwrap.indent(file.text.rstrip(), "    | "), soft_wrap=True)
    for process in plan.processes[:SHOWN_PROCESSES]:
        where = process.host or "this machine"
        which = f"node {process.node_rank} on {where}:" if spec.shared_filesystem else f"{where}:"
        console.print(f"  {which}")
        console.print(f"    {shlex.join(process.argv)}", soft_wrap=True)
    if len(plan.processes) > SHOWN_PROCESSES:
        console.print(f"  ... {len(plan.processes):,} in all")
    for note in plan.notes:
        console.print(f"  note: {note}", style="yellow")
    for name, argv in plan.operations.items():
        console.print(f"  by hand, {name}: {shlex.join(argv)}", soft_wrap=True)


def _show_kernels(console: Console, request: RunRequest) -> None:
    """Each operation's kernel; one that lacks something here may yet run where the ranks do."""
    try:
        kernels = kernels_of_run(request.run, request.backend, request.registry)
    except NotAvailableError as error:
        console.print("\n[bold]Kernels[/bold]", markup=True)
        console.print(f"  ranks on this machine would refuse: {error}")
        return
    if kernels:
        console.print("\n[bold]Kernels[/bold] that ranks on this machine would run", markup=True)
    for operation, choice in kernels.items():
        console.print(f"  {operation}: {choice.name}, {choice.reason}")
        for name, reason in choice.rejected:
            console.print(f"    not {name}: {reason}")


def _show_checks(console: Console, found: Findings, expected: Decision) -> None:
    console.print("\n[bold]Checks[/bold] before ranks start", markup=True)
    if found.data:
        console.print(f"  data: {found.data}")
    for line in found.advice.splitlines():
        console.print(f"  {line}", style="yellow")
    for line in expected.lines:
        console.print(f"  {line}")
    for note in (*found.notes, *filter(None, [expected.note])):
        console.print(f"  note: {note}", style="yellow")
    if not found.notes:
        console.print(
            "  no problem found in model, tokenizer and rows, as far as they can be checked "
            "without a device"
        )


def _training_lines(request: RunRequest, found: Findings) -> Iterator[str]:
    """The run's length, what a step is made of, and its learning rates."""
    run, train = request.run, request.run.train
    steps, epochs = found.steps or train.steps, found.epochs
    if epochs is None and train.steps is None:
        epochs = train.epochs
    yield ", ".join(
        [f"{steps:,} steps" if steps else "steps: known once the rows are read"]
        + ([f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"] if epochs else [])
    )
    parts = share_of(run, request.registry, 0, request.job.world_size).count
    size = train.sequences_at_once(parts)
    count = accumulation(train.global_batch_size, size, parts)
    each = "ranks" if parts == request.job.world_size else "groups of ranks"
    yield (
        f"{train.global_batch_size} {'packs' if run.data.packs else 'rows'} a step: {count} "
        f"micro-batch{'es' if count > 1 else ''} of {size} on each of {parts} {each}"
    )
    peak, schedule, rates = train.optimizer.lr, train.schedule, f"up to {train.optimizer.lr:.1e}"
    if steps:
        rates = ", ".join(
            f"{learning_rate(at, steps, peak, schedule):.1e} at step {at + 1:,}"
            for at in sorted({0, min(warmup_steps(steps, schedule), steps - 1), steps - 1})
        )
    yield f"learning rate: {rates} ({train.optimizer.name}, {schedule.name})"


def _show_engine(console: Console, request: RunRequest, found: Findings) -> None:
    if found.settings:
        run, job = request.run, request.job
        folder = cache_folder(run.data.cache, os.environ) or Path(tempfile.gettempdir())
        path = folder / f"{job.name}-{job.strategy}.json"
        settings = {
            one.name: {"value": one.value, "reason": one.reason, "source": one.source}
            for one in found.settings
        }
        write_text(path, json.dumps(settings, indent=2) + "\n", 0o600)
        console.print(f"  {len(settings)} settings of {job.strategy}, with reasons: {path}")
    elif found.settings is not None:
        none = "is not decided yet" if request.job.strategy == AUTO else "has none"
        console.print(f"  {request.job.strategy} {none}")
    if found.engine_note:
        console.print(f"  {found.engine_note}")
