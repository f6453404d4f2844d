"""Trains the same model on the same rows with anygauge and its peers, in alternation.

    python benchmarks/train_vs_peers.py --workload gsm8k --rounds 5 --output runs/peers

Each round runs every contender once, beginning one further on than the round before; ratios are
taken within a round. See --help for the settings, `benchmarks/entrants.py` for the contenders and
`benchmarks/measure.py` for what is measured. Needs the extra `bench`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.util.files import write_text
from benchmarks import session
from benchmarks.contender_plan import ContenderPlan, Dtype
from benchmarks.contender_processes import raise_when_terminated
from benchmarks.entrants import ENTRANTS, Entrant, chosen
from benchmarks.measure import markdown, summarize
from benchmarks.workload_rows import WORKLOADS


def measure(
    workload: str, entrants: Sequence[Entrant], plan: ContenderPlan, workloads: dict[str, Any]
) -> bool:
    """All rounds of one workload; `workloads` and the files grow with every run. Returns whether
    all went well."""
    classes = f"{plan.classes:,} classes, " if plan.classes else ""
    title = (
        f"{workload}: {plan.layers} layers of {plan.hidden}, {classes}{plan.dtype}, "
        f"LoRA r16, {plan.ranks} ranks x {plan.micro_batch} rows x "
        f"{plan.accumulation} micro-batches, {plan.steps} steps ({plan.warmup} "
        f"warm-up), checkpointing {'on' if plan.checkpointing else 'off'}"
    )
    rows, plan, about = session.prepare(workload, plan)
    print(about, flush=True)
    output = Path(plan.output)
    table = output / "table.md"
    before = table.read_text(encoding="utf-8") + "\n" if table.exists() else ""
    shown, outcomes = "", []
    for outcome in session.each_run(entrants, plan, rows, output / workload, may_fail=True):
        outcomes.append(outcome)
        summary = summarize(outcomes, entrants)
        shown = markdown(title, summary)
        runs = [{**asdict(each), "final_loss": each.final_loss} for each in outcomes]
        workloads[workload] = {"summary": [asdict(row) for row in summary], "runs": runs}
        record = {"conditions": session.conditions(asdict(plan)), "workloads": workloads}
        write_text(output / "results.json", json.dumps(record, indent=2) + "\n")
        write_text(table, before + shown)
    print(shown, flush=True)
    return all(outcome.status == "ok" for outcome in outcomes)


def chosen_workloads(workload: str, data: str) -> list[str]:
    """The workloads that a name stands for; `all` takes generated rows where there is no data."""
    if workload == "all":
        return ["full", "gsm8k", "alpaca"] if data else ["full", "generated"]
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"{workload!r} is none of {', '.join((*WORKLOADS, 'all'))}")
    return [workload]


def named(listed: str, workload: str) -> str:
    """The list of contenders; `all` leaves out what full-length rows cannot show, and what runs on
    one rank."""
    if listed != "all":
        return listed
    return ",".join(
        name
        for name, entrant in ENTRANTS.items()
        if not entrant.alone and (workload != "full" or entrant.layout == "padded")
    )


def main(
    context: typer.Context,
    workload: Annotated[
        str, typer.Option(help="full (every row --length tokens), gsm8k, alpaca, generated, all.")
    ] = "all",
    contenders: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(ENTRANTS)}; or all.")
    ] = "all",
    output: session.Output = Path("runs/train_vs_peers"),
    rounds: session.Rounds = 5,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps, warm-up included.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="First steps, not measured.")] = 4,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    layers: session.Count = 8,
    hidden: Annotated[int, typer.Option(min=2)] = 512,
    intermediate: Annotated[int, typer.Option(min=0, help="0: 2.6875 times hidden.")] = 0,
    heads: session.Count = 8,
    kv_heads: Annotated[int, typer.Option(min=0, help="0: as many as heads.")] = 0,
    vocabulary: Annotated[int, typer.Option(min=300, help="Most tokens.")] = 4096,
    classes: Annotated[
        int, typer.Option(min=0, help="Of the model's output; 0: as many as there are tokens.")
    ] = 0,
    length: Annotated[int, typer.Option(min=8, help="full: tokens of every row.")] = 256,
    max_length: Annotated[
        int, typer.Option(min=8, help="Others: longer rows are left out; capacity of a pack.")
    ] = 512,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows per forward and rank.")] = 4,
    accumulation: Annotated[int, typer.Option(min=1, help="Forwards per step.")] = 2,
    dtype: Dtype = "float32",
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations.")] = True,
    lr: Annotated[float, typer.Option(min=0, help="Constant learning rate of AdamW.")] = 2e-3,
    seed: Annotated[int, typer.Option(min=0, help="Weights, choice of rows, orders.")] = 0,
    timeout_s: session.Timeout = 1800,
    before: session.Older = None,
) -> None:
    """Measure training speed, memory and traffic side by side."""
    if warmup >= steps:
        raise typer.BadParameter(f"--warmup {warmup} leaves none of --steps {steps} to measure")
    if hidden % heads or hidden // heads % 2:
        raise typer.BadParameter(f"--hidden {hidden} is not an even multiple of --heads {heads}")
    data = os.environ.get("ANYGAUGE_DATA", "")
    plan = session.planned(context, intermediate=intermediate or round(hidden * 2.6875), data=data)
    workloads: dict[str, Any] = {}
    with session.command(output):
        well = [
            measure(each, chosen(named(contenders, each), before), plan, workloads)
            for each in chosen_workloads(workload, data)
        ]
    print(f"written: {plan.output}/results.json and table.md", flush=True)
    if not all(well):
        raise typer.Exit(1)


if __name__ == "__main__":
    raise_when_terminated()
    typer.run(main)
