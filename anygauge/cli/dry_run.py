"""What ``anygauge train --dry-run`` shows: everything that is settled before a device is opened."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from anygauge.agent.rank import rank_numbers
from anygauge.cli.env import environment_table, rank_environments, shown_ranks
from anygauge.cli.intent import Intent, rendered
from anygauge.cli.launchers import describe
from anygauge.cli.memory_check import Expectation, checked
from anygauge.cli.preflight import preflight
from anygauge.cli.resume import gone_on_with
from anygauge.interface import ABILITIES, Backend, NotAvailableError
from anygauge.kernels.choose import KernelChoice, kernels_of_run

if TYPE_CHECKING:
    from anygauge.training.checks import Findings


SHOWN_PROCESSES = 32


def show(intent: Intent, *, plan: bool | None = None, force: bool = False) -> None:
    """Check and print the run; starts nothing, opens no device, writes to the cache of rows alone.

    Args:
        plan, force: as for a run.

    Raises:
        AnygaugeError: what the run's ranks would refuse.
    """
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    _, finished = gone_on_with(intent)
    if finished is not None:
        console.print(finished.describe(), markup=False)
        return
    intent, found, expected = checked(
        intent, lambda it: preflight(it, engine=True), asked=plan, force=force
    )
    job, run = intent.job, intent.run
    why = f" ({job.strategy_why})" if job.strategy_why else ""
    console.print(f"Run {job.name}: would write {job.run_directory}", style="bold", markup=False)
    console.print(
        f"  backend {job.backend}, strategy {job.strategy}{why}, {job.launch.nodes} x "
        f"{job.launch.devices} ranks, launcher {run.launch.launcher}",
        markup=False,
    )
    for name, reason in intent.selection.rejected:
        console.print(f"  not {name}: {reason}", markup=False)
    remote = intent.registry.find_launcher(run.launch.launcher).spec.remote
    if not remote and not intent.selection.probe.available:
        console.print(
            f"  ranks cannot start on this machine: {intent.selection.probe.reason}",
            style="yellow",
            markup=False,
        )
    _show_checks(console, found, expected)
    console.print("\n[bold]Environment[/bold] of each rank, decided before torch is imported")
    if remote:
        console.print("  as on this machine; the job's machines decide their own")
    ranks = shown_ranks(job.launch.devices)
    if len(ranks) < job.launch.devices:
        console.print(f"  of ranks 0 to {ranks[-2]} and {ranks[-1]} of a machine")
    console.print(environment_table(rank_environments(intent)))
    console.print("\n[bold]Engine configuration[/bold]")
    _show_engine(console, intent, found)
    backend = intent.registry.create_backend(intent.selection.spec.name, run.backend_options)
    _show_kernels(console, intent, backend)
    _show_plan(console, intent)
    console.print(
        f"  each agent starts {job.launch.devices}: python -m anygauge.training.worker",
        markup=False,
    )
    first, last = (
        rank_numbers(job, node, local)
        for node, local in ((0, 0), (job.launch.nodes - 1, job.launch.devices - 1))
    )
    numbers = (
        f"{name}={value}" if value == last[name] else f"{name}={value}..{last[name]}"
        for name, value in first.items()
    )
    console.print(f"    with {' '.join(numbers)}", markup=False)


def _show_plan(console: Console, intent: Intent) -> None:
    """What the launcher would do, and what it was tested on."""
    # The token by which agents know each other is drawn at submission.
    plan = rendered(replace(intent, job=replace(intent.job, id="", token="")))
    spec = intent.registry.find_launcher(intent.run.launch.launcher).spec
    console.print("\n[bold]Processes[/bold]")
    about = describe(spec)
    console.print(f"  launcher {spec.name}; tested: {about['tested_on']} ({about['proof']})")
    for ability in about["can"]:
        console.print(f"    a job {ABILITIES[ability]}", markup=False)
    for file in plan.files:
        console.print(f"  writes {file.path}", markup=False)
        # Files for nobody else hold values of variables.
        if not spec.shared_filesystem and file.mode & 0o077:
            console.print(f"{textwrap.indent(file.text.rstrip(), '    | ')}", markup=False)
    for process in plan.processes[:SHOWN_PROCESSES]:
        where = process.host or "this machine"
        which = f"node {process.node_rank} on {where}:" if spec.shared_filesystem else f"{where}:"
        console.print(f"  {which}", markup=False)
        console.print(f"    {shlex.join(process.argv)}", markup=False)
    if len(plan.processes) > SHOWN_PROCESSES:
        console.print(f"  ... {len(plan.processes):,} in all")
    for note in plan.notes:
        console.print(f"  note: {note}", style="yellow", markup=False)
    for name, argv in plan.operations.items():
        console.print(f"  by hand, {name}: {shlex.join(argv)}", markup=False)


def _show_kernels(console: Console, intent: Intent, backend: Backend) -> None:
    """Each operation's kernel; one that lacks something here may yet run where the ranks do."""
    try:
        kernels = kernels_of(intent, backend)
    except NotAvailableError as error:
        console.print("\n[bold]Kernels[/bold]")
        console.print(f"  ranks on this machine would refuse: {error}", markup=False)
        return
    if kernels:
        console.print("\n[bold]Kernels[/bold] that ranks on this machine would run")
    for operation, choice in kernels.items():
        console.print(f"  {operation}: {choice.name}, {choice.reason}", markup=False)
        for name, reason in choice.rejected:
            console.print(f"    not {name}: {reason}", markup=False)


def kernels_of(intent: Intent, backend: Backend) -> dict[str, KernelChoice]:
    """The kernels that ranks would run, those included that an engine may replace."""

    return kernels_of_run(intent.run, backend, intent.registry)


def _show_checks(console: Console, found: Findings, expected: Expectation) -> None:
    console.print("\n[bold]Checks[/bold] before ranks start")
    if found.data:
        console.print(f"  data: {found.data}", markup=False)
    if found.advice:
        console.print(f"  {found.advice}", style="yellow", markup=False)
    for line in expected.lines:
        console.print(f"  {line}", markup=False)
    for note in (*found.notes, *filter(None, [expected.note])):
        console.print(f"  note: {note}", style="yellow", markup=False)
    if not found.notes:
        console.print(
            "  no problem found in model, tokenizer and rows, as far as they can be checked "
            "without a device"
        )


def _show_engine(console: Console, intent: Intent, found: Findings) -> None:
    for setting in found.settings or ():
        console.print(f"  {setting.name} = {json.dumps(setting.value)}", markup=False)
        console.print(f"      {setting.reason} ({setting.source})", style="dim", markup=False)
    if found.settings is not None and not found.settings:
        console.print(f"  {intent.job.strategy} has none")
    if found.engine_note:
        console.print(f"  {found.engine_note}", markup=False)
