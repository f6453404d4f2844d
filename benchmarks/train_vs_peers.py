"""Trains the same model on the same rows with anygauge and its peers, in alternation.

    python benchmarks/train_vs_peers.py --workload gsm8k --rounds 5 --output runs/peers

Each round runs every contender once, beginning one further on than the round before; ratios are
taken within a round. See --help for the settings, `benchmarks/entrants.py` for the contenders and
`benchmarks/measure.py` for what is measured. Needs the extra `bench`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anygauge.util.files import write_text
from benchmarks.entrants import ENTRANTS
from benchmarks.errors import BenchmarkError
from benchmarks.measure import RunOutcome
from benchmarks.ratios import rotated
from benchmarks.session import SessionSettings, conditions, prepare, run_once
from benchmarks.table import as_json, markdown, summarise
from benchmarks.texts import WORKLOADS

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def section(workload: str, settings: SessionSettings, outcomes: Sequence[RunOutcome]) -> str:
    """The table of a workload."""
    classes = f"{settings.classes:,} classes, " if settings.classes else ""
    title = (
        f"{workload}: {settings.layers} layers of {settings.hidden}, "
        f"{classes}{settings.dtype}, "
        f"LoRA r16, {settings.ranks} ranks x {settings.micro_batch} rows x "
        f"{settings.accumulation} micro-batches, {settings.steps} steps ({settings.warmup} "
        f"warm-up), checkpointing {'on' if settings.checkpointing else 'off'}"
    )
    return markdown(title, summarise(outcomes, list(ENTRANTS)))


def save(settings: SessionSettings, results: Mapping[str, Sequence[RunOutcome]]) -> None:
    """Write ``results.json`` and ``table.md``, after every run anew."""
    write_text(settings.output / "results.json", as_json(conditions(settings), results))
    sections = [section(name, settings, outcomes) for name, outcomes in results.items()]
    write_text(settings.output / "table.md", "\n".join(sections))


def measure(workload: str, names: Sequence[str], settings: SessionSettings, results: Any) -> None:
    """All rounds of one workload; `results` grows with every run."""
    rows, plan, about = prepare(workload, settings)
    console.print(about, markup=False)
    outcomes = results.setdefault(workload, [])
    for round_ in range(settings.rounds):
        for name in rotated(names, round_):
            folder = settings.output / workload / f"round{round_ + 1}" / name
            result = run_once(
                ENTRANTS[name], plan, rows, settings, folder=folder, round_=round_ + 1
            )
            outcomes.append(result)
            save(settings, results)
            told = (
                f"{result.tokens_per_s:,.0f} tokens/s"
                if result.tokens_per_s
                else f"{result.status}: {result.problem}"
            )
            console.print(f"  round {round_ + 1} {name}: {told}", markup=False)
            for line in result.log:
                console.print(f"      {line}", style="dim", markup=False)
    console.print(section(workload, settings, outcomes), markup=False)


def chosen_workloads(workload: str, data: Path | None) -> list[str]:
    """The workloads that a name stands for; `all` takes generated rows where there is no data.

    Raises:
        typer.BadParameter: there is no such workload.
    """
    if workload == "all":
        return ["full", "gsm8k", "alpaca"] if data else ["full", "generated"]
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"{workload!r} is none of {', '.join((*WORKLOADS, 'all'))}")
    return [workload]


def chosen_contenders(listed: str, workload: str) -> list[str]:
    """Names from a comma-separated list; `all` leaves out what full-length rows cannot show, and
    what runs on one rank.

    Raises:
        typer.BadParameter: there is no such contender.
    """
    if listed == "all":
        return [
            name
            for name, entrant in ENTRANTS.items()
            if not entrant.alone and (workload != "full" or entrant.layout == "padded")
        ]
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    unknown = [name for name in names if name not in ENTRANTS]
    if unknown or not names:
        raise typer.BadParameter(f"{listed!r}: choose from {', '.join(ENTRANTS)}, or all")
    return names


def main(
    workload: Annotated[
        str, typer.Option(help="full (every row --length tokens), gsm8k, alpaca, generated, all.")
    ] = "all",
    contenders: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(ENTRANTS)}; or all.")
    ] = "all",
    output: Annotated[Path, typer.Option(help="A new folder for results and logs.")] = Path(
        "runs/train_vs_peers"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Each runs every contender once.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps, warm-up included.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="First steps, not measured.")] = 4,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=2)] = 512,
    intermediate: Annotated[int, typer.Option(min=0, help="0: 2.6875 times hidden.")] = 0,
    heads: Annotated[int, typer.Option(min=1)] = 8,
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
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations.")] = True,
    lr: Annotated[float, typer.Option(min=0, help="Constant learning rate of AdamW.")] = 2e-3,
    seed: Annotated[int, typer.Option(min=0, help="Weights, choice of rows, orders.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one run.")] = 1800,
) -> None:
    """Measure training speed, memory and traffic side by side."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"--dtype {dtype!r} is neither float32 nor bfloat16")
    if warmup >= steps:
        raise typer.BadParameter(f"--warmup {warmup} leaves none of --steps {steps} to measure")
    if hidden % heads or hidden // heads % 2:
        raise typer.BadParameter(f"--hidden {hidden} is not an even multiple of --heads {heads}")
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"--output {output} is not empty: name a new folder")
    data = os.environ.get("ANYGAUGE_DATA")
    settings = SessionSettings(
        rounds=rounds,
        steps=steps,
        warmup=warmup,
        ranks=ranks,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate or round(hidden * 2.6875),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        classes=classes,
        length=length,
        max_length=max_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        checkpointing=checkpointing,
        lr=lr,
        seed=seed,
        timeout_s=timeout,
        output=output.resolve(),
        data=Path(data) if data else None,
    )
    workloads = chosen_workloads(workload, settings.data)
    try:
        results: dict[str, list[RunOutcome]] = {}
        for each in workloads:
            measure(each, chosen_contenders(contenders, each), settings, results)
    except BenchmarkError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
    console.print(f"written: {settings.output}/results.json and table.md", markup=False)
    if any(result.status != "ok" for found in results.values() for result in found):
        raise typer.Exit(1)


def _terminated(signum: int, _: Any) -> None:
    # As an exception, so that the processes of the running contender are ended.
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    typer.run(main)
