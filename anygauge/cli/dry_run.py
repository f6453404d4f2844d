"""What ``anygauge train --dry-run`` shows: everything that is settled before a device is opened."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from anygauge.agent.supervisor import rank_numbers
from anygauge.cli.env import environment_table, rank_environments
from anygauge.cli.launchers import describe
from anygauge.cli.plan import Intent, rendered
from anygauge.interface import ABILITIES, AnygaugeError, Backend, NotAvailableError
from anygauge.registry import KernelChoice


def show(intent: Intent) -> None:
    """Print the run; writes nothing, starts nothing, opens no device."""
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    job, run = intent.job, intent.run
    console.print(f"Run {job.name}: would write {job.run_directory}", style="bold", markup=False)
    console.print(
        f"  backend {job.backend}, strategy {job.strategy}, {job.nodes} x {job.devices_per_node} "
        f"ranks, launcher {run.launch.launcher}",
        markup=False,
    )
    for name, reason in intent.selection.rejected:
        console.print(f"  not {name}: {reason}", markup=False)
    apart = intent.registry.find_launcher(run.launch.launcher).spec.elsewhere
    console.print("\n[bold]Environment[/bold] of each rank, decided before torch is imported")
    if apart:
        console.print("  as it would be here; the job's machines decide for themselves")
    console.print(environment_table(rank_environments(intent)))
    console.print("\n[bold]Engine configuration[/bold]")
    _show_engine(console, intent)
    backend = intent.registry.create_backend(intent.selection, run.backend_options)
    _show_kernels(console, intent, backend)
    _show_plan(console, intent)
    console.print(
        f"  each agent starts {job.devices_per_node}: python -m anygauge.training.worker",
        markup=False,
    )
    first, last = (
        rank_numbers(job, node, local)
        for node, local in ((0, 0), (job.nodes - 1, job.devices_per_node - 1))
    )
    numbers = (
        f"{name}={value}" if value == last[name] else f"{name}={value}..{last[name]}"
        for name, value in first.items()
    )
    console.print(f"    with {' '.join(numbers)}", markup=False)


def _show_plan(console: Console, intent: Intent) -> None:
    """What the launcher would do, and how far it was proven."""
    # The token by which agents know each other is drawn at submission.
    plan = rendered(replace(intent, job=replace(intent.job, id="", token="")))
    spec = intent.registry.find_launcher(intent.run.launch.launcher).spec
    console.print("\n[bold]Processes[/bold]")
    about = describe(spec)
    console.print(f"  launcher {spec.name}; proven: {about['proven']} ({about['proof']})")
    for ability in about["can"]:
        console.print(f"    a job {ABILITIES[ability]}", markup=False)
    for file in plan.files:
        console.print(f"  writes {file.path}", markup=False)
        # Such a job has no secrets by value.
        if spec.apart and Path(file.path).name not in ("job.json", "variables.json"):
            console.print(f"{textwrap.indent(file.text.rstrip(), '    | ')}", markup=False)
    for process in plan.processes:
        where = process.host or "this machine"
        which = f"{where}:" if spec.apart else f"node {process.node_rank} on {where}:"
        console.print(f"  {which}", markup=False)
        console.print(f"    {shlex.join(process.argv)}", markup=False)
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
        console.print(f"  refused if the ranks ran here: {error}", markup=False)
        return
    if kernels:
        console.print("\n[bold]Kernels[/bold] that ranks on this machine would run")
    for operation, choice in kernels.items():
        console.print(f"  {operation}: {choice.name}, {choice.reason}", markup=False)
        for name, reason in choice.rejected:
            console.print(f"    not {name}: {reason}", markup=False)


def kernels_of(intent: Intent, backend: Backend) -> dict[str, KernelChoice]:
    """The kernels that ranks would run; without torch, also those that an engine may replace."""
    try:
        from anygauge.strategies import create_strategy
        from anygauge.training.kernels import kernels_of_run
    except ImportError:
        return intent.registry.resolve_kernels(backend, intent.run.kernels)
    strategy = create_strategy(intent.run.strategy, intent.job.world_size)
    return kernels_of_run(intent.run, backend, intent.registry, strategy)


def _show_engine(console: Console, intent: Intent) -> None:
    try:
        settings, note = engine_settings(intent)
    except ImportError as error:
        console.print(f"  not shown: {error.name} is not installed here", markup=False)
        return
    for setting in settings:
        console.print(f"  {setting.name} = {json.dumps(setting.value)}", markup=False)
        console.print(f"      {setting.reason} ({setting.source})", style="dim", markup=False)
    if not settings:
        console.print(f"  {intent.job.strategy} has none")
    if note:
        console.print(f"  {note}", markup=False)


def engine_settings(intent: Intent) -> tuple[list[Any], str]:
    """The engine's settings with the model's sizes in them, and a note on what is not known.

    Raises:
        ImportError: torch or transformers is missing, as on a login node.
    """
    from anygauge.config.precision import resolve_precision
    from anygauge.models.factory import CausalModelFactory
    from anygauge.models.quiet import quiet_libraries
    from anygauge.strategies import create_strategy
    from anygauge.strategies.base import torch_dtype

    quiet_libraries()
    run = intent.run
    backend = intent.registry.create_backend(intent.selection, run.backend_options)
    precision = resolve_precision(run.precision, backend.placement.dtypes, backend.support)
    strategy = create_strategy(run.strategy, intent.job.world_size)
    note = (
        f"precision.compute is auto: {precision.compute} unless the opened device says otherwise"
        if run.precision.compute == "auto"
        else ""
    )
    skeleton = None
    try:
        factory = CausalModelFactory(
            run.model,
            run.adapter,
            attention="eager",
            dtype=torch_dtype(precision.compute),
            seed=run.train.seed,
            gradient_checkpointing=run.train.gradient_checkpointing,
        )
        skeleton = factory.adapt(factory.skeleton())
    except AnygaugeError as error:
        note += f"\n  settings that depend on the model's sizes are left out: {error}"
    settings = strategy.settings(
        backend,
        precision,
        skeleton=skeleton,
        micro_batch=run.train.sequences_at_once(intent.job.world_size),
        max_norm=run.train.clip,
        recomputes=run.train.gradient_checkpointing,
    )
    return list(settings), note.strip()
