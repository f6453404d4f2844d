"""One workload: its rows and model made once, then run by any contender."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.interface import installed_version
from anygauge.util.files import write_text
from benchmarks.contender_plan import BenchmarkError, ContenderPlan
from benchmarks.contender_processes import ROOT, cause, last_lines, run, shared_environment
from benchmarks.entrants import Entrant, processes
from benchmarks.measure import MeasureError, RunOutcome, TableRow, outcome, rotated, table
from benchmarks.workload_rows import WrittenRows, source, write_rows

PARAMETERS = "parameters.txt"
"""File beside a model's weights that has their number."""
PACKAGES = (
    *("anygauge", "torch", "triton", "transformers", "peft", "accelerate", "deepspeed", "trl"),
    *("datasets", "liger-kernel", "pytest"),
)

Output = Annotated[Path, typer.Option(help="A new folder for results and logs.")]
Rounds = Annotated[int, typer.Option(min=1, help="Each runs every contender once.")]
Count = Annotated[int, typer.Option(min=1)]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one run.")]
Older = Annotated[
    Path | None,
    typer.Option(help="A checkout of an older commit, whose code is a contender.", exists=True),
]
"""Options of the commands that run contenders."""


def planned(context: typer.Context, **more: Any) -> ContenderPlan:
    """The plan of a command: its options that are fields of a plan, and what it says beside."""
    names = {field.name for field in fields(ContenderPlan)}
    given = {name: value for name, value in context.params.items() if name in names}
    output = str(Path(context.params["output"]).resolve())
    return ContenderPlan(**{**given, "output": output, **more})


def prepare(workload: str, plan: ContenderPlan) -> tuple[WrittenRows, ContenderPlan, str]:
    """Write rows, tokenizer and model of a workload; returns rows, the plan on them, and words."""
    rows, plan, about = prepare_rows(workload, plan)
    return rows, plan, f"{about}; model of {make_model(plan):,} parameters"


def prepare_rows(workload: str, plan: ContenderPlan) -> tuple[WrittenRows, ContenderPlan, str]:
    """`prepare` without the model's weights."""
    folder = Path(plan.output) / workload
    rows = write_rows(workload, folder, plan)
    about = f"{workload}: {source(workload, bool(plan.data))}; {rows.about}"
    on_them = replace(
        plan,
        model=str(folder / "model"),
        rows=str(rows.exact),
        has_prompts=workload != "full",
        max_length=plan.length if workload == "full" else plan.max_length,
        classes=max(rows.vocabulary, plan.classes),
    )
    return rows, on_them, about


def make_model(plan: ContenderPlan) -> int:
    """Link random weights into ``plan.model``; returns how many parameters they are.

    Workloads whose models are alike share a file: it is drawn once.
    """
    alike = (*plan.llama.values(), plan.stored, plan.seed, plan.device)
    folder = Path(plan.output) / "-".join(["weights", *map(str, alike)])
    if not folder.is_dir():
        described = folder.with_name(f"{folder.name}.json")
        plan.save(described)
        made = subprocess.run(
            [sys.executable, "-m", "benchmarks.session", str(described), str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if made.returncode:
            raise BenchmarkError(f"the model could not be made:\n{made.stderr[-2000:]}")
    for file in folder.iterdir():
        os.link(file, Path(plan.model) / file.name)
    return int((folder / PARAMETERS).read_text(encoding="utf-8"))


def draw_weights(plan: ContenderPlan, folder: Path) -> None:
    """Save a Llama with fixed random weights: in a process of its own, for this one never imports
    torch."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = AutoConfig.for_model(**plan.llama, **tokens, dtype=plan.stored)
    torch.manual_seed(plan.seed)
    torch.set_default_dtype(getattr(torch, plan.stored))
    with torch.device(plan.device):  # a host draws for minutes
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    (folder / PARAMETERS).write_text(str(count), encoding="utf-8")


def run_once(
    entrant: Entrant, plan: ContenderPlan, rows: WrittenRows, *, folder: Path, round_: int
) -> RunOutcome:
    """Run one contender once; what goes wrong is part of the outcome."""
    folder.mkdir(parents=True)
    plan = replace(
        plan,
        output=str(folder),
        layout=entrant.layout,
        deepspeed=entrant.deepspeed,
        compiled=entrant.compiled,
        rows=str(rows.pool if entrant.layout == "packed" else rows.exact),
    )
    began = time.time()
    ended = run(processes(entrant, plan, shared_environment(plan)), plan.timeout_s)
    problem = ended.problem
    found = RunOutcome(name=entrant.name, round=round_, status="ok", wall_seconds=ended.seconds)
    try:
        # What has trained has figures, though it failed afterwards.
        found = outcome(
            entrant, plan, round_=round_, expected=rows.tokens, began=began, wall_s=ended.seconds
        )
    except (MeasureError, ValueError) as error:  # ValueError: a last line was cut off
        problem = problem or str(error)
    if problem is None:
        return found
    log = last_lines(folder)
    why = cause(log)
    missing = "No module named" in why or "pip install" in why
    remedy = "pip install 'anygauge[bench]'" if missing else ""
    said = ": ".join(filter(None, (problem, why, remedy)))
    status = "missing" if missing else "failed"
    return replace(found, status=status, problem=f"{said}; see {folder}", log=log)


def each_run(
    entrants: Sequence[Entrant],
    plan: ContenderPlan,
    rows: WrittenRows,
    folder: Path,
    *,
    may_fail: bool = False,
) -> Iterator[RunOutcome]:
    """All rounds; each begins with another contender. What came of a run is told as it ends."""
    for round_ in range(plan.rounds):
        for entrant in rotated(entrants, round_):
            where = folder / f"round{round_ + 1}" / entrant.name
            found = run_once(entrant, plan, rows, folder=where, round_=round_ + 1)
            told = f"{found.status}: {found.problem}"
            if found.tokens_per_s:
                first = f"first step after {found.first_step_s:.1f} s"
                told = f"{found.tokens_per_s:,.0f} tokens/s, {first}"
            print(f"  round {round_ + 1} {entrant.title}: {told}", flush=True)
            print("".join(f"      {text}\n" for text in found.log), end="", flush=True)
            if found.status != "ok" and not may_fail:
                raise BenchmarkError(f"{found.name}: {found.status}: {found.problem}")
            yield found


@contextmanager
def command(output: Path) -> Iterator[None]:
    """Around a command that measures into a new folder."""
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"--output {output} is not empty: name a new folder")
    try:
        yield
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def write_all(
    output: Path, plan: ContenderPlan, rows: Sequence[TableRow], runs: Sequence[Mapping[str, Any]]
) -> None:
    """Write ``table.md`` and ``results.json``, and show the table."""
    shown = "\n".join(table(rows)) + "\n"
    record = {**conditions(asdict(plan)), "runs": runs}
    write_text(output / "results.json", json.dumps(record, indent=1) + "\n")
    write_text(output / "table.md", shown)
    print(shown)


def conditions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Machine, versions and settings, for the record."""
    return {
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions(),
        "settings": settings,
    }


def versions() -> dict[str, str]:
    """Of the packages that decide what is measured."""
    return {name: installed_version(name) or "not installed" for name in PACKAGES}


if __name__ == "__main__":
    draw_weights(ContenderPlan.load(sys.argv[1]), Path(sys.argv[2]))
