"""Peak memory of loading, training, evaluation and saving, beside peers, by size of vocabulary.

    python -m benchmarks.memory_phases --classes 32000,128000 --rounds 3 --output runs/memory

All contenders train the same adapter on the same padded rows, evaluate on these rows with the same
batch, and save the adapter. A figure is the sum over ranks of each rank's peak resident memory in
that phase in MiB, Python and its libraries included (see `shim/benchmark_watch.py`); in brackets
is the median of its ratios to the first contender's, taken within a round. Trainers evaluate with
``prediction_loss_only``, which saves them memory. anygauge also loads the saved adapter again and
compares it with the trained model, which no peer does: ``--no-verify`` leaves that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks import session
from benchmarks.contender_plan import BenchmarkError
from benchmarks.entrants import Entrant, chosen
from benchmarks.measure import MIB, RunOutcome, TableRow, in_order

CONTENDERS = ("anygauge-fsdp", "anygauge", "trainer", "trl")
PHASES = ("load", "training", "evaluation", "save")


def table_rows(
    classes: int, found: Sequence[RunOutcome], entrants: Sequence[Entrant]
) -> list[TableRow]:
    """A row for each contender at one size of the vocabulary."""

    def peaks(entrant: Entrant, phase: str) -> list[int]:
        return [sum(r[phase] for r in run.phases) for run in in_order(found, entrant)]

    rows = []
    for entrant in entrants:
        figures = {}
        for phase in PHASES:
            most, first = peaks(entrant, phase), peaks(entrants[0], phase)
            ratio = median(a / b for a, b in zip(most, first, strict=True))
            figures[phase] = f"{median(most) / MIB:,.0f} ({ratio:.2f})"
        rows.append(TableRow(case=f"{classes:,} classes", name=entrant.title, figures=figures))
    return rows


def check(found: RunOutcome, folder: Path, ranks: int) -> None:
    """That a run did all that is compared."""
    if len(found.phases) != ranks or not all({*PHASES} <= {*rank} for rank in found.phases):
        raise BenchmarkError(f"{found.name}: a rank left out one of {', '.join(PHASES)}")
    where = folder / f"round{found.round}" / found.name
    if not list(where.rglob("adapter_model.safetensors")):
        raise BenchmarkError(f"{found.name} saved no adapter in {where}")


def main(
    context: typer.Context,
    sizes: Annotated[
        str, typer.Option("--classes", help="Sizes of the model's output.")
    ] = "32000,128000",
    names: Annotated[str, typer.Option("--contenders")] = ",".join(CONTENDERS),
    output: session.Output = Path("runs/memory_phases"),
    rounds: session.Rounds = 3,
    steps: Annotated[int, typer.Option(min=2)] = 3,
    layers: session.Count = 8,
    hidden: Annotated[int, typer.Option(min=32, help="A multiple of 32.")] = 512,
    length: Annotated[int, typer.Option(min=8, help="Tokens of every row.")] = 256,
    micro_batch: Annotated[int, typer.Option(min=1, help="Of training and evaluation.")] = 2,
    verifies: Annotated[
        bool, typer.Option("--verify/--no-verify", help="anygauge checks what it saved.")
    ] = True,
    timeout_s: session.Timeout = 900,
) -> None:
    """Measure the peak of each phase side by side."""
    entrants = chosen(names)
    plan = session.planned(
        context, intermediate=round(hidden * 2.6875), max_length=length, evaluates=True,
        heads=hidden // 16 if hidden < 128 else hidden // 64, dtype="bfloat16", stored="bfloat16",
    )  # fmt: skip
    rows_of_table: list[TableRow] = []
    runs = []
    with session.command(output):
        for count in map(int, sizes.split(",")):
            folder = output.resolve() / str(count)
            rows, of_size, about = session.prepare(
                "full", replace(plan, classes=count, output=str(folder))
            )
            print(f"{count:,} classes: {about}", flush=True)
            found = [*session.each_run(entrants, of_size, rows, folder)]
            for one in found:
                check(one, folder, plan.ranks)
                runs.append({"classes": count, **asdict(one)})
            rows_of_table += table_rows(count, found, entrants)
        session.write_all(output, plan, rows_of_table, runs)


if __name__ == "__main__":
    typer.run(main)
