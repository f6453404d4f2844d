"""``anygauge plan RUN.yaml``: what a run takes of each device, how long that takes, what to change.

What is found is printed at once; `anygauge.cli.planned` has the words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anygauge.cli.intent import BackendOption, DevicesOption, NodesOption, SetOption

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.planning.machines import Hardware
    from anygauge.planning.trials import Target
    from anygauge.registry import Registry

MACHINE = "A node type, or a card and a count: p5.48xlarge, h100:8. Default: this machine."
HARDWARE = "A file that describes cards and machines; repeatable."
COMPARE = "Another machine to compare with; repeatable."
CALIBRATE = "Measure the speed of this machine's cards for later plans; takes no run file."
SUGGEST = "Suggest changes that need less, even if the run fits."

Paths = Annotated[list[Path] | None, typer.Option("--hardware", metavar="FILE", help=HARDWARE)]
Names = Annotated[list[str] | None, typer.Option("--compare", metavar="NAME", help=COMPARE)]


def plan(
    run_file: Annotated[
        Path | None, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")
    ] = None,
    machine: Annotated[str | None, typer.Option("--machine", help=MACHINE)] = None,
    nodes: NodesOption = None,
    devices: DevicesOption = None,
    backend: BackendOption = None,
    hardware: Paths = None,
    set_: SetOption = None,
    suggest: Annotated[bool, typer.Option("--suggest", help=SUGGEST)] = False,
    strategies: Annotated[
        bool, typer.Option("--strategies", help="Try every strategy and mesh of that many ranks.")
    ] = False,
    compare: Names = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help=CALIBRATE)] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how much memory and time a run needs, without its devices."""
    from anygauge.cli import interrupts_end_process
    from anygauge.cli.fetch import fetch_configuration
    from anygauge.cli.planned import Page, no_memory
    from anygauge.interface import UsageError
    from anygauge.planning.changes import (
        Choice,
        largest_batch,
        longest_rows,
        try_strategies,
        what_to_change,
    )
    from anygauge.planning.machines import Hardware, measured_files
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
    flags = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
    names = list(dict.fromkeys([*([machine] if machine else []), *(compare or ())])) or [None]
    cases = [_case(run_file, set_ or [], flags, name, described, registry) for name in names]
    (run, target), *_ = cases
    known = target.card is not None and target.card.memory is not None
    if suggest and not known:
        why = "no card was found here" if target.card is None else no_memory(target)
        raise UsageError(f"--suggest: {why}; name a machine whose memory is known")
    fetch_configuration(run)
    page, tried = Page(quiet=json_), Trials(registry, _waiting)
    with _with_variables(run.environment), interrupts_end_process():
        trial = tried(run, target)
        notes = [described.note_on(other.machine) for _, other in cases if other.machine]
        page.trial(trial, target, [note for note in notes if note])
        run = trial.run  # with what strategy `auto` is there
        if known:
            batch = largest_batch(trial, target, tried, registry)
            lengths = longest_rows(trial, target, tried)
            page.largest(batch, lengths)
        if compare:
            rows = [Choice(target.place).tried(run, target, tried) for run, target in cases]
            page.rows("machine", "machines", rows)
        if strategies:
            page.rows("strategy", "strategies", try_strategies(run, target, tried, registry))
        if known and (suggest or not trial.fits):
            page.changes(what_to_change(trial, target, tried, registry, batch, lengths))
    if json_:
        typer.echo(json.dumps(page.record, indent=2))


def _case(
    run_file: Path,
    overrides: list[str],
    flags: dict[str, Any],
    name: str | None,
    described: Hardware,
    registry: Registry,
) -> tuple[RunFile, Target]:
    """The run as it would be on a machine, and that machine; None: this one."""
    from anygauge.interface import RunFileError
    from anygauge.planning.trials import Target, changed, fast_types
    from anygauge.registry import select_backend

    if name is None:
        run = _loaded(run_file, overrides, flags)
        chosen = select_backend(registry, run.backend, need_device=False).spec.name
        known = any(one.name == chosen for one in described.cards)
        return run, Target(backend=chosen, card=described.card(chosen) if known else None)
    machine = described.machine(name)
    card = described.card(machine.card)
    # A card that no backend drives is planned as for the first of those that drive cards.
    first = max(registry.backends, key=lambda one: one.spec.priority).spec.name
    usual = {"launch.devices": machine.cards, "backend": card.backend or first}
    given = {path for path, value in flags.items() if value is not None}
    given |= {override.partition("=")[0].strip() for override in overrides}
    own = {path: value for path, value in usual.items() if path not in given}
    run = _loaded(run_file, overrides, {**flags, **own})
    if run.precision.param_dtype == "auto" and (kinds := fast_types(card)):
        # What its backend would say when the card is open.
        run = changed(run, {"precision.param_dtype": kinds[0]})
    if run.launch.devices > machine.cards:
        raise RunFileError(
            f"launch.devices: {run.launch.devices}, but machine {machine.name!r} has "
            f"{machine.cards} cards; leave --devices out, or name a larger machine"
        )
    return run, Target(backend=run.backend, card=card, machine=machine)


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


@contextmanager
def _with_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Those of a run, where the user's own environment has none, for as long as it is planned."""
    missing = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _waiting(subject: str) -> AbstractContextManager[Any]:
    """Say what is planned, on a terminal alone."""
    from anygauge.cli.console import Console

    console = Console(stderr=True)
    return console.status(subject) if console.draws else nullcontext()
