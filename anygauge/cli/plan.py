"""``anygauge plan RUN.yaml``: what a run takes of each device, and how long that takes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anygauge.cli.intent import (
    BackendOption,
    DevicesOption,
    NodesOption,
    SetOption,
)

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.planning.machines import Hardware
    from anygauge.planning.trials import Target
    from anygauge.registry import Registry

PATIENCE_S = 0.2
"""A rehearsal that takes longer is announced, where somebody watches."""


class What(StrEnum):
    """What `--largest` looks for."""

    batch = "batch"
    sequence = "sequence"


def plan(
    run_file: Annotated[
        Path | None, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            help="A node type, or a card and a count: p5.48xlarge, h100:8. Default: this machine.",
        ),
    ] = None,
    nodes: NodesOption = None,
    devices: DevicesOption = None,
    backend: BackendOption = None,
    hardware: Annotated[
        list[Path] | None,
        typer.Option(
            "--hardware",
            metavar="FILE",
            help="A file that describes cards and machines; repeatable.",
        ),
    ] = None,
    set_: SetOption = None,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest", help="Suggest changes that need less memory, even if the run fits."
        ),
    ] = False,
    strategies: Annotated[
        bool,
        typer.Option("--strategies", help="Try every strategy and mesh of that many ranks."),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare", metavar="NAME", help="Another machine to compare with; repeatable."
        ),
    ] = None,
    largest: Annotated[
        What | None, typer.Option("--largest", help="Find the largest that fits.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows", min=1, help="Number of training rows: shows time and cost of an epoch."
        ),
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option("--scale", min=2, help="Show the speed on 1 up to this many machines."),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the speed of this machine's cards for later plans; takes no run file.",
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how much memory and time a run needs, without its devices."""
    from anygauge.cli import plan_time, planned
    from anygauge.interface import UsageError
    from anygauge.planning.changes import nearest
    from anygauge.planning.machines import Hardware, measured_files
    from anygauge.planning.process import begun
    from anygauge.planning.trials import Trials
    from anygauge.registry import Registry

    if calibrate:
        if run_file is not None:
            raise UsageError(
                f"--calibrate measures this machine and takes no run file: leave {run_file} out"
            )
        from anygauge.cli.calibrate import calibrate as measure

        measure(backend, devices, as_json=json_)
        return
    if run_file is None:
        raise UsageError("no run file is given: anygauge plan RUN.yaml, or --calibrate without one")
    registry = Registry.load()
    described = Hardware.load(registry, [*measured_files(), *(hardware or ())])
    overrides = list(set_ or ())
    flags = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
    machines = list(dict.fromkeys([*([machine] if machine else []), *(compare or ())]))
    cases = [
        _case(run_file, overrides, flags, name, described, registry) for name in machines or [None]
    ]
    run, target = cases[0]
    planned.check_wanted(target, suggest=suggest, largest=largest is not None)
    _fetch(run)
    with Trials(registry, _waiting, begun()) as trials:
        trial = trials(run, target)
        run = trial.run  # with what strategy `auto` is there
        answers = planned.PlanAnswers(trial=trial, target=target, rows=rows)
        shown = planned.Shown(quiet=json_)
        shown.trial(trial, target)  # the others may take their time
        shown.lines(*plan_time.lines(trial, target, rows))
        if compare:
            answers.machines = [planned.row(r, t, trials, planned.name_of(t)) for r, t in cases]
            shown.rows("machine", answers.machines)
        if scale is not None:
            answers.scaling = planned.scaled(run, target, trials, scale)
            shown.rows("machines", answers.scaling)
        if strategies:
            answers.strategies = planned.try_strategies(run, target, trials)
            shown.rows("strategy", answers.strategies)
        if largest is not None:
            answers.largest = planned.find_largest(run, target, trials, largest.value)
            shown.lines(planned.words_of_largest(*answers.largest))
        if suggest or not (trial.fit is None or trial.fit.fits or strategies or compare):
            answers.changes = nearest(run, target, trials, registry)
            shown.changes(answers.changes)
    if json_:
        typer.echo(json.dumps(planned.record(answers), indent=2))


def _case(
    run_file: Path,
    overrides: list[str],
    flags: dict[str, Any],
    name: str | None,
    described: Hardware,
    registry: Registry,
) -> tuple[RunFile, Target]:
    """The run as it would be on a machine, and that machine; None: this one."""
    from anygauge.config.schema import AUTO_ORDER
    from anygauge.interface import RunFileError
    from anygauge.planning.trials import Target
    from anygauge.registry import select_backend

    flags = dict(flags)
    asked = None if name is None else described.machine(name)
    if asked is not None:
        card = described.card(asked.card)
        # A card that no backend drives is planned as for the first of those that drive cards.
        first = max(registry.backends, key=lambda one: one.spec.priority).spec.name
        usual = {"launch.devices": asked.cards, "backend": card.backend or first}
        given = {path for path, value in flags.items() if value is not None}
        given |= {override.partition("=")[0].strip() for override in overrides}
        flags |= {path: value for path, value in usual.items() if path not in given}
    run = _loaded(run_file, overrides, flags)
    if asked is not None and run.precision.param_dtype == "auto":
        rates = {**card.flops, **card.matmul}
        fast = [kind for kind in AUTO_ORDER if kind in rates]
        if fast and fast[0] != AUTO_ORDER[0]:
            # What its backend would say when the card is open.
            run = _loaded(run_file, overrides, {**flags, "precision.param_dtype": fast[0]})
    if asked is not None and run.launch.devices > asked.cards:
        raise RunFileError(
            f"launch.devices: {run.launch.devices}, but machine {asked.name!r} has {asked.cards} "
            "cards; leave --devices out, or name a larger machine"
        )
    if asked is not None:
        return run, Target(backend=run.backend, card=card, machine=asked)
    chosen = select_backend(registry, run.backend, need_device=False).spec.name
    known = any(one.name == chosen for one in described.cards)
    return run, Target(backend=chosen, card=described.card(chosen) if known else None)


def _loaded(run_file: Path, overrides: list[str], flags: dict[str, Any]) -> RunFile:
    """The run; one that only lacks a tokenizer can be planned."""
    from anygauge.config.load import load_run_file
    from anygauge.interface import RunFileError

    try:
        return load_run_file(run_file, overrides, flags).run
    except RunFileError:
        with suppress(RunFileError):
            return load_run_file(run_file, [*overrides, "model.tokenizer=none"], flags).run
        raise


def _fetch(run: RunFile) -> None:
    """Have the model's configuration here; where no hub answers, a copy that is here will do."""
    from anygauge.cli.fetch import fetched
    from anygauge.models.hub import CONFIG, copy_of, wanted_for_plan
    from anygauge.models.hub_errors import HubUnreachableError

    try:
        fetched(wanted_for_plan(run.model), {**run.environment, **os.environ}, quiet=True)
    except HubUnreachableError:
        copy = copy_of(run.model.name or "", run.model.revision)
        if copy is None or not (copy / CONFIG).is_file():
            raise


@contextmanager
def _waiting(subject: str) -> Iterator[None]:
    """Say what is rehearsed where that takes long, on a terminal alone."""
    import threading

    from anygauge.cli.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    status = console.status(subject)
    timer = threading.Timer(PATIENCE_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
