"""``anygauge plan RUN.yaml``: what a run takes of each device, how long that takes, what to change.

Each answer is printed as soon as it is there, the verdict first; JSON comes at the end.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from anygauge.cli import interrupts_end_process
from anygauge.cli.calibrate import calibrate as measure
from anygauge.cli.shared_options import (
    RUN_FILE,
    BackendOption,
    DevicesOption,
    JsonOption,
    NodesOption,
    SetOption,
)
from anygauge.config.load import RunSource, load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import Card, RunFileError, UsageError
from anygauge.interface.estimate import KINDS
from anygauge.launch.prepare import fetch_configuration
from anygauge.planning import changes
from anygauge.planning.changes import Choice
from anygauge.planning.fit import GIB
from anygauge.planning.machines import Hardware, measured_files
from anygauge.planning.trials import Target, Trial, Trials, fast_types, with_changes
from anygauge.registry import Registry, select_backend
from anygauge.util.console import Console, make_table
from anygauge.util.text import format_time

MACHINE = "A node type, or a card and a count: p5.48xlarge, h100:8. Default: this machine."
HARDWARE = "A file that describes cards and machines; repeatable."
COMPARE = "Another machine to compare with; repeatable."
CALIBRATE = "Measure the speed of this machine's cards for later plans; takes no run file."
SUGGEST = "Suggest changes that need less, even if the run fits."
STRATEGIES = "Try every strategy and mesh of that many ranks."
MIN_PART = 0.001
"""Kinds of a smaller part of the largest phase have no line."""
PARTS = {
    "multiplying": "matrix products",
    "moving": "other operations",
    "issuing": "host",
    "cards": "sends in a machine",
    "machines": "sends between machines",
    "copying": "copies to the host and back",
    "on_host": "operations there",
    "hidden": "overlapped",
    "idle": "stages wait",
}
"""Fields of `Duration`, and what is printed of them."""


def plan(
    run_file: Annotated[Path | None, RUN_FILE] = None,
    machine: Annotated[str | None, typer.Option(help=MACHINE)] = None,
    nodes: NodesOption = None,
    devices: DevicesOption = None,
    backend: BackendOption = None,
    hardware: Annotated[list[Path] | None, typer.Option(metavar="FILE", help=HARDWARE)] = None,
    set_: SetOption = None,
    suggest: Annotated[bool, typer.Option("--suggest", help=SUGGEST)] = False,
    strategies: Annotated[bool, typer.Option("--strategies", help=STRATEGIES)] = False,
    compare: Annotated[list[str] | None, typer.Option(metavar="NAME", help=COMPARE)] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help=CALIBRATE)] = False,
    json_: JsonOption = False,
) -> None:
    """Show how much memory and time a run needs, without its devices."""
    if calibrate and run_file is not None:
        raise UsageError(f"--calibrate measures this machine: leave the run file {run_file} out")
    if calibrate:
        return measure(backend, devices, as_json=json_)
    if run_file is None:
        raise UsageError("no run file is given: anygauge plan RUN.yaml, or --calibrate without one")
    flags = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
    asked = Asked(machine, hardware or [], suggest, strategies, compare or [])
    terminal = (Console(quiet=json_), Console(stderr=True).status, interrupts_end_process)
    record = answer(run_file, set_ or [], flags, asked, *terminal)
    if json_:
        typer.echo(json.dumps(record, indent=2))


class Asked(NamedTuple):
    """Options of a plan."""

    machine: str | None
    hardware: Sequence[Path]
    suggest: bool
    strategies: bool
    compare: Sequence[str]


def answer(
    run_file: RunSource,
    overrides: list[str],
    flags: Mapping[str, Any],
    asked: Asked,
    console: Console,
    waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    planning: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Print a plan as its parts are there; returns docs/planning.md's keys of JSON.

    Args:
        run_file, overrides, flags: as of `load_run_file`.
        waiting: see `Trials`.
        planning: entered while anything is computed.
    """
    machine, hardware, suggest, strategies, compare = asked
    registry = Registry.load()
    described = Hardware.load(registry, [*measured_files(), *hardware])
    names: list[str | None] = [*dict.fromkeys([*([machine] if machine else []), *compare])]
    read = partial(load_run_file, run_file)
    cases = [
        read_case(read, overrides, flags, name, described, registry) for name in names or [None]
    ]
    (run, target), *_ = cases
    unknown = why_no_verdict(target.card)
    if suggest and unknown:
        raise UsageError(f"--suggest: {unknown}")
    fetch_configuration(run)
    tried = Trials(registry, waiting)
    with ExitStack() as stack:
        for name in run.environment.keys() - os.environ.keys():
            os.environ[name] = run.environment[name]
            stack.callback(os.environ.pop, name)
        stack.enter_context(planning())
        trial = tried(run, target)
        notes = [described.note_on(at.machine) for _, at in cases if at.machine]
        record = _show_trial(console, trial, [note for note in notes if note])
        if not unknown:
            batch, lengths = changes.largest_batch(trial, tried), changes.longest_rows(trial, tried)
            record["largest"] = {one.name: one.record() for one in (batch, lengths)}
            console.print(f"Largest micro-batch on this card: {_largest_line(batch)}")
            console.print(f"Longest rows on this card: {_largest_line(lengths)}")
        if compare:
            rows = [Choice(at.machine.name).plan(run, at, tried) for run, at in cases if at.machine]
            record["machines"] = _show_choices(console, "machine", rows)
        if strategies:
            layouts = changes.try_strategies(trial, tried)
            record["strategies"] = _show_choices(console, "strategy", layouts)
        if not unknown and (suggest or not trial.fits):
            found = changes.what_to_change(trial, tried, batch, lengths)
            record["changes"] = show_changes(console, found, fits=trial.fits)
    return record


def read_case(
    read: Callable[..., RunFile],
    overrides: list[str],
    flags: Mapping[str, Any],
    name: str | None,
    described: Hardware,
    registry: Registry,
) -> tuple[RunFile, Target]:
    """The run as it would be on a machine, and that machine; None: this one.

    Args:
        read: gives the run, from overrides and flags.
    """
    if name is not None:
        machine = described.machine(name)
        card = described.card(machine.card)
        # A card that no backend drives is planned as for the first of those that drive cards.
        first = max(registry.backends, key=lambda one: one.spec.priority).spec.name
        usual = {"launch.devices": machine.cards, "backend": card.backend or first}
        own = [f"{path}={value}" for path, value in usual.items() if flags.get(path) is None]
        overrides = [*own, *overrides]
    try:
        run = read(overrides, flags)
    except RunFileError as error:
        try:  # one that only lacks a tokenizer can be planned
            run = read([*overrides, "model.tokenizer=none"], flags)
        except RunFileError:
            raise error from None
    if name is None:
        here = select_backend(registry, run.backend, need_device=False)
        return run, Target(backend=here.spec.name, card=described.of_devices(here.probe.cards))
    if run.precision.param_dtype == "auto" and (kinds := fast_types(card)):
        # What its backend would say when the card is open.
        run = with_changes(run, {"precision.param_dtype": kinds[0]})
    if run.launch.devices > machine.cards:
        has = f"launch.devices: {run.launch.devices}, but {machine.name} has {machine.cards} cards"
        raise RunFileError(f"{has}; leave --devices out, or name a larger machine")
    return run, Target(backend=run.backend, card=card, machine=machine)


def _show_trial(console: Console, trial: Trial, notes: Sequence[str]) -> dict[str, Any]:
    """Verdict, notes on machines, phases and time; returned are docs/planning.md's keys of JSON."""
    target, (verdict, *about) = trial.target, trial_lines(trial)
    console.print(verdict, style="bold")
    console.print("\n".join([*about, *notes]))
    console.print(make_table(_phase_rows(trial)))
    console.print("\n".join(_time_lines(trial)))
    return {
        **trial.record(),
        "fits": None if trial.fit is None else trial.fit.fits,
        "backend": target.backend,
        "machine": target.machine and target.machine.name,
        "card": target.card and target.card.name,
        "notes": notes,
        "untimed": trial.untimed or None,
        **{name: value for name, value in asdict(trial.memory).items() if name != "work"},
        **dict.fromkeys(("largest", "changes", "machines", "strategies")),
    }


def why_no_verdict(card: Card | None) -> str:
    """Why no verdict is possible; "" where one is."""
    if card is None:
        return "Not compared with a device's memory: name a machine (--machine h100:8)"
    if card.memory is not None:
        return ""
    return (
        f"No verdict: the description of {card.name} ({card.origin}) does not say how much memory "
        "it has. Add it in a file of your own (--hardware FILE.toml): "
        f'[card.{card.name}] memory = "80 GiB"'
    )


def trial_lines(trial: Trial) -> Iterator[str]:
    """Whether a run fits, what it needs, and what is left or missing; then what was planned."""
    fit, card, found = trial.fit, trial.target.card, trial.memory
    if card is None or fit is None:
        yield why_no_verdict(card)
    else:
        has = f"each {card.name} needs {_gib(fit.needs)} of {_gib(fit.memory)} GiB ({fit.phase})"
        for name, (needed, there) in fit.shared.items():
            of = "" if there is None else f" of {_gib(there)}"
            has += f"; {name} of a machine: {_gib(needed)}{of} GiB"
        missing = [
            f"{_gib(size)} GiB of {card.name if what == 'memory' else what}"
            for what, size in fit.shortages.items()
        ]
        fits = f"Fits: {has}; {_gib(fit.free)} GiB of {card.name} stay free"
        yield f"Does not fit: {has}; missing: {', '.join(missing)}" if missing else fits
    total, trained = found.numbers
    yield (
        f"{total:,} parameters, {trained:,} trained by {trial.run.train.optimizer.name}; "
        f"{found.precision.param_dtype}; {found.strategy}; "
        f"{trial.ranks} rank{'s' if trial.ranks > 1 else ''}"
    )
    yield f"Kernels assumed: {', '.join(map(' '.join, found.kernels.items()))}"
    yield f"Activations: {found.per_layer / 2**20:,.1f} MiB of each layer for a micro-batch"
    if fit is not None and found.uncompiled:
        most = fit.with_margins(max(peak.total for peak in found.uncompiled.values()))
        yield f"Without its graph compiler ({found.compiled}): {_gib(most)} GiB"
    if card is not None and not card.backend:
        yield f"No backend here drives {card.name}; planned with {trial.target.backend} instead"


def _phase_rows(trial: Trial) -> Sequence[Sequence[str]]:
    """Rows of a table: what each phase takes, by kind."""
    device, fit = trial.memory.device, trial.fit
    kinds = dict.fromkeys([*KINDS, *(kind for peak in device.values() for kind in peak.kinds)])
    lines = {kind: [peak.kinds.get(kind, 0) for peak in device.values()] for kind in kinds}
    least = MIN_PART * trial.memory.worst_phase[1].total
    lines = {kind: sizes for kind, sizes in lines.items() if max(sizes) > least}
    totals = [peak.total for peak in device.values()]
    if fit is None:
        lines["tensors"] = totals
    else:
        needed = [fit.phases[phase] for phase in device]
        lines["on top"] = [a - b for a, b in zip(needed, totals, strict=True)]
        lines |= {"needed": needed, "left": [fit.memory - one for one in needed]}
    return [("GiB", *device), *((name, *map(_gib, sizes)) for name, sizes in lines.items())]


def _time_lines(trial: Trial) -> Iterator[str]:
    time, ranks = trial.time, trial.ranks
    if time is None:
        yield f"Time: not known: {trial.untimed}"
        return
    mfu = "" if time.mfu is None else f"; MFU {time.mfu:.0%}"
    each = f" ({time.tokens_per_s / ranks:,.0f} each)" if ranks > 1 else ""
    yield f"Time: a step {format_time(time.step)}; {time.tokens_per_s:,.0f} tokens/s{each}{mfu}"
    took = {**asdict(time), **time.sending}
    yield "  " + ", ".join(f"{said} {format_time(took[n])}" for n, said in PARTS.items() if took[n])
    if trial.target.card is not None and trial.target.card.shared_memory:
        yield "  a rough estimate: a processor reaches other rates than those of large products"
    if (steps := trial.run.train.steps) is not None:
        yield f"  the run: {steps:,} steps, {format_time(steps * time.step)}"


def _largest_line(found: Choice) -> str:
    if found.trial is None or found.trial.fit is None:
        return "none fits"
    said = ", ".join(f"{path}: {value:,}" for path, value in found.lines.items())
    why = f"; {found.why}" if found.why else ""
    return f"{said} (needs {_gib(found.trial.fit.needs)} GiB{why})"


def _show_choices(console: Console, what: str, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Machines or strategies; returns them for programs."""
    rows = [(what, "ranks", "fits", "needed, GiB", "left, GiB", "phase", "step", "tokens/s")]
    for name, trial in ((one.name, one.trial) for one in choices if one.trial):
        fit, time, held, speed = trial.fit, trial.time, ("?", "?", "?"), ("?", "?")
        if fit is not None:
            held = "yes" if fit.fits else "no", _gib(fit.needs), _gib(fit.free)
        if time is not None:
            speed = format_time(time.step), f"{time.tokens_per_s:,.0f}"
        rows.append((name, str(trial.ranks), *held, trial.memory.worst_phase[0], *speed))
    console.print(make_table(rows))
    for one in choices:
        if one.trial is None:
            console.print(f"refused: {one.name}: {one.why}", style="dim")
    return [one.record() for one in choices]


def show_changes(console: Console, found: Iterable[Choice], *, fits: bool) -> list[dict[str, Any]]:
    """Print what to change of a run that fits, or does not, as options; returns as above."""
    record: list[dict[str, Any]] = []
    console.print("What to change, cheapest first:", style="bold")
    for number, one in enumerate(found, 1):
        record.append(one.record())
        fit, time = record[-1]["fit"], record[-1]["time"]
        said = "fits" if fit["fits"] else "does not fit"
        takes = "" if time is None else f", a step {format_time(time['step'])}"
        console.print(f"{number}. {said}: needs {_gib(fit['needed'])} GiB{takes}: {one.name}")
        options = " ".join(f"--set {shlex.quote(option)}" for option in one.options)
        console.print(f"     {options}", style="green", soft_wrap=True)
    if fits and not record:
        console.print("No change that was tried needs less")
    elif not any(one["fit"]["fits"] for one in record):
        console.print(
            "No single change that was tried makes it fit: pass several, or use more cards, or "
            "cards with more memory (--compare shows several), or a smaller model"
        )
    return record


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
