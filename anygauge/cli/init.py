"""``anygauge init``: a commented run file that fits a machine, from flags or a few answers."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli import interrupts_end_process, plan
from anygauge.cli.fields import schema_text
from anygauge.cli.shared_options import SetOption
from anygauge.config.describe import Kind, kind_of_run, meaning_in
from anygauge.config.document import read_yaml
from anygauge.config.json_schema import run_file_schema
from anygauge.config.layers import read_command_line
from anygauge.config.load import check_paths, load_run_file
from anygauge.config.paths import is_remote
from anygauge.config.schema import DataSection, RunFile
from anygauge.config.sections import AdapterSection, OptimizerSection, TrainSection
from anygauge.config.tree import Origin, Problem, merge, plain_value, run_file_error
from anygauge.config.yaml_text import write_yaml
from anygauge.data import peek
from anygauge.interface import AnygaugeError, DataError, UnsupportedError, UsageError
from anygauge.launch.prepare import fetch_configuration
from anygauge.planning import changes
from anygauge.planning.changes import BATCH, Choice
from anygauge.planning.machines import Hardware, measured_files
from anygauge.planning.trials import Target, Trial, Trials
from anygauge.registry import AUTO, Registry, select_backend
from anygauge.training.build_strategy import share_of
from anygauge.util.console import Console
from anygauge.util.files import write_text
from anygauge.util.section import Section
from anygauge.util.text import first_line, near_file

SCHEMA = "anygauge.schema.json"
"""Beside the run file, so that its first line names it on every machine that has both."""
LR_OF_ALL_WEIGHTS = 2e-5
"""Stanford Alpaca's, which others took from there; the schema's default is an adapter's."""


GOALS = ("lora", "qlora", "full")
QUESTIONS = {
    "model": "Model: a folder, or a name on the hub",
    "rows": "Rows: a file, its address, or a data set on the hub",
    "machine": "Machine: a node type, or a card and a count, such as CARD:8 [this machine]",
    "goal": "Goal: lora, qlora (its base in 4 bits), or full (all weights) [lora]",
}


def init(
    file: Annotated[Path, typer.Argument(help="The run file to write.", metavar="FILE")] = Path(
        "run.yaml"
    ),
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.")] = None,
    rows: Annotated[
        str | None, typer.Option(help="A file, its address, or a data set on the hub.")
    ] = None,
    machine: Annotated[str | None, typer.Option(help=plan.MACHINE)] = None,
    goal: Annotated[str | None, typer.Option(help=f"{', '.join(GOALS)}; default: lora.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Most tokens in a row.")] = None,
    hardware: Annotated[list[Path] | None, typer.Option(metavar="FILE", help=plan.HARDWARE)] = None,
    set_: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Write a commented run file that fits a machine, from flags or from what it asks."""
    if file.exists() and not force:
        raise UsageError(f"{file} exists: name another file, or overwrite it with --force")
    registry = Registry.load()
    described = Hardware.load(registry, [*measured_files(), *(hardware or ())])
    with interrupts_end_process():
        given = {"model": model, "rows": rows, "machine": machine, "goal": goal}
        answers = _ask_missing(given, described)
        values = _first_values(answers, described, registry, file.parent)
        if max_length is not None:
            values["data"]["max_length"] = max_length
        draft = partial(_draft_run, file, set_ or [], answers["machine"], described, registry)
        text, trial, batch = _fit_batch(values, draft, registry)
    write_text(file, text)
    console = Console()
    verdict, layout, *_ = plan.trial_lines(trial)
    console.print(verdict, style="bold")
    console.print(layout)
    chosen, most = trial.run.train.micro_batch_size, batch.lines[BATCH]
    console.print(f"{BATCH}: {chosen}; the largest that the card holds: {most:,}")
    typer.echo(f"{file} is written, for an editor with {_write_schema(file.parent, force=force)}")
    typer.echo(f"Next: anygauge data {file}, which shows rows; then anygauge train {file}")


def _ask_missing(given: Mapping[str, str | None], described: Hardware) -> dict[str, str]:
    """Return what is given, and what is answered to questions about the rest.

    Raises:
        UsageError: model or rows are missing, and nobody can be asked.
        AnygaugeError: what is given is wrong.
    """
    asks = sys.stdin is not None and sys.stdin.isatty()
    missing = [name for name in ("model", "rows") if given[name] is None]
    if missing and not asks:
        flags = " and ".join(f"--{name}" for name in missing)
        raise UsageError(
            f"give {flags}: standard input is not a terminal, so nobody can be asked. anygauge "
            f"init --model MODEL --rows ROWS [--machine plan.MACHINE] [--goal {'|'.join(GOALS)}]"
        )
    found = {name: answer for name, answer in given.items() if answer is not None}
    for name, answer in found.items():
        _check_answer(name, answer, described)
    for name, question in QUESTIONS.items():
        while name not in found:
            answer = input(f"{question}: ").strip() if asks else ""
            try:
                _check_answer(name, answer, described)
            except AnygaugeError as error:
                typer.echo(f"  {first_line(error)}")
            else:
                found |= {name: answer} if answer or name not in missing else {}
    return found


def _check_answer(name: str, text: str, described: Hardware) -> None:
    """Raises: AnygaugeError: an answer is wrong; none is not."""
    if name == "machine" and text:
        described.machine(text)
    if name == "goal" and text not in ("", *GOALS):
        raise UsageError(f"--goal: {text!r} is not one of {', '.join(GOALS)}")
    if name == "rows" and text and not is_remote(text) and not Path(text).expanduser().is_file():
        raise UsageError(f"--rows: no such file: {text}{near_file(Path(text))}")


def _first_values(
    answers: Mapping[str, str], described: Hardware, registry: Registry, folder: Path
) -> dict[str, Any]:
    """Return the fields of a run file in a folder; defaults of those that the planner decides."""
    # Paths in a file are relative to it.
    model, rows = (
        os.path.relpath(path, folder) if Path(path).exists() and folder != Path() else path
        for path in (answers["model"], answers["rows"])
    )
    goal, values = answers["goal"], dict[str, Any]()
    if answers["machine"]:
        machine = described.machine(answers["machine"])
        devices = machine.cards
        if backend := described.card(machine.card).backend:
            values["backend"] = backend
    else:
        probe = select_backend(registry, AUTO, need_device=False).probe
        card = described.of_devices(probe.cards)
        devices = 1 if card is None or card.shared_memory else probe.device_count or 1
    values["model"] = {"name": model}
    if goal == "qlora":
        values["model"]["quantize"] = "nf4"
    if goal != "full":
        values["adapter"] = _field_defaults(AdapterSection, "r", "alpha", "targets")
    values["data"] = {"train": {"path": rows}, **_field_defaults(DataSection, "max_length")}
    train = _field_defaults(TrainSection, "epochs", "global_batch_size")
    train["global_batch_size"] = -(-train["global_batch_size"] // devices) * devices
    train["micro_batch_size"] = 1
    lr = _field_defaults(OptimizerSection, "lr") if goal != "full" else {"lr": LR_OF_ALL_WEIGHTS}
    return {**values, "train": {**train, "optimizer": lr}, "launch": {"devices": devices}}


def _field_defaults(section: type[Section], *names: str) -> dict[str, Any]:
    return {name: section.model_fields[name].default for name in names}


Draft = Callable[[Mapping[str, Any]], tuple[str, RunFile, Target]]


def _draft_run(
    file: Path,
    overrides: list[str],
    machine: str,
    described: Hardware,
    registry: Registry,
    values: Mapping[str, Any],
) -> tuple[str, RunFile, Target]:
    """Write the text of a run file, and read the run that it says on a machine; "": this one.

    Raises:
        RunFileError: an override is wrong, or a field.
        UsageError: nothing is known of the machine's memory.
    """
    problems: list[Problem] = []
    root = read_yaml(write_yaml(values), Origin(str(file), None, file.parent), problems)
    assert root is not None
    root = merge(root, read_command_line(overrides, {}, Path.cwd(), problems))
    if problems:
        raise run_file_error(str(file), problems)
    lines = [
        f"# yaml-language-server: $schema={SCHEMA}",
        "# The first line has editors complete this file, and explain its fields.",
        *_render_fields(plain_value(root), kind_of_run(root)),
    ]
    text = "".join(f"{line}\n" for line in lines)
    read = partial(load_run_file, file, text=text)
    # What the file says, and not the machine.
    said = {"backend": root.get("backend"), "launch.devices": root.get("launch", "devices")}
    own = {path: node.value for path, node in said.items() if node is not None and machine}
    run, target = plan.read_case(read, [], own, machine or None, described, registry)
    if missing := plan.why_no_verdict(target.card):
        raise UsageError(missing)
    return text, run, target


def _render_fields(values: Mapping[str, Any], kind: Kind, indent: str = "") -> Iterator[str]:
    """Yield lines of YAML, each field below what it means."""
    for name, value in values.items():
        below, section = kind.child(name) or Kind(Any), kind.section
        if section is not None and name in section.model_fields:
            comment = f"{indent}# "
            yield from textwrap.wrap(
                meaning_in(section, name), 96, initial_indent=comment, subsequent_indent=comment
            )
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _render_fields(value, below, f"{indent}  ")
        else:
            yield textwrap.indent(write_yaml({name: value}).rstrip("\n"), indent)


def _fit_batch(
    values: dict[str, Any], draft: Draft, registry: Registry
) -> tuple[str, Trial, Choice]:
    """Write the text of a run that fits, with the largest micro-batch that divides a rank's part.

    Raises:
        UnsupportedError: none fits; what would was printed.
        AnygaugeError: what the run would be refused for.
    """
    text, run, target = draft(values)
    check_paths(run)
    try:
        peek(run.data, run.train)
    except DataError as error:
        raise UsageError(f"{error}. Give init such fields with --set FIELD=VALUE") from None
    fetch_configuration(run)
    tried = Trials(registry, Console(stderr=True).status)
    trial = tried(run, target)
    batch = changes.largest_batch(trial, tried)
    if batch.lines:
        share = run.train.global_batch_size
        share //= share_of(trial.run, registry, 0, trial.ranks).count
        sizes = range(1, min(share, batch.lines[BATCH]) + 1)
        values["train"]["micro_batch_size"] = max(one for one in sizes if share % one == 0)
        text, run, target = draft(values)
        trial = tried(run, target)
    if not trial.fits:
        console = Console()
        console.print(next(plan.trial_lines(trial)), style="bold")
        rows = changes.longest_rows(trial, tried)
        plan.show_changes(console, changes.what_to_change(trial, tried, batch, rows), fits=False)
        raise UnsupportedError(
            "no run file is written: such a run does not fit. Pass one of these --set, another "
            "--goal, or a --machine with more memory"
        )
    return text, trial, batch


def _write_schema(folder: Path, *, force: bool) -> str:
    """Write the schema beside the run file, unless there is one; return what to say of it."""
    path = folder / SCHEMA
    if path.exists() and not force:
        return f"{path} as it is (anygauge schema --output {path} renews it)"
    write_text(path, schema_text(run_file_schema()[0]))
    return str(path)
