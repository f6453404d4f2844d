"""Peak memory of loading, training, evaluation and saving, beside peers, by size of vocabulary.

    python -m benchmarks.memory_phases --classes 32000,128000 --rounds 3 --output runs/memory

All contenders train the same adapter on the same padded rows, evaluate on these rows with the same
batch, and save the adapter. A figure is the sum over ranks of each rank's peak resident memory in
that phase, Python and its libraries included (see `shim/benchmark_phases.py`); ratios are taken
within a round. Trainers evaluate with ``prediction_loss_only``, which saves them memory. anygauge
also loads the saved adapter again and compares it with the trained model, which no peer does:
``--no-verify`` leaves that out (``adapter.verify: false``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from anygauge.util.files import write_text
from benchmarks.entrants import ENTRANTS, Entrant
from benchmarks.errors import BenchmarkError
from benchmarks.plan import ContenderPlan
from benchmarks.ratios import rotated
from benchmarks.rows import WrittenRows
from benchmarks.session import SessionSettings, conditions, prepare, run_once

CONTENDERS = ("anygauge-fsdp", "anygauge", "trainer", "trl")
PHASES = ("load", "training", "evaluation", "save")
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """One run.

    Attributes:
        classes: of the model's output.
        phases: phase -> bytes, the sum of each rank's own peak.
        of_ranks: the same of each rank.
    """

    name: str
    classes: int
    round: int
    phases: Mapping[str, int]
    of_ranks: Sequence[Mapping[str, int]]


def peaks(
    entrant: Entrant,
    plan: ContenderPlan,
    rows: WrittenRows,
    settings: SessionSettings,
    folder: Path,
    round_: int,
) -> Peaks:
    """Run a contender once.

    Raises:
        BenchmarkError: it failed, or left a phase out.
    """
    result = run_once(entrant, plan, rows, settings, folder=folder, round_=round_)
    if result.status != "ok":
        log = "\n".join(result.log)
        raise BenchmarkError(f"{entrant.name}: {result.status}: {result.problem}\n{log}")
    of_ranks = [
        json.loads((folder / f"phases-rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(plan.ranks)
    ]
    for rank, found in enumerate(of_ranks):
        if missing := [phase for phase in PHASES if phase not in found]:
            raise BenchmarkError(f"{entrant.name}: rank {rank} had no phase {', '.join(missing)}")
    if not list(folder.rglob("adapter_model.safetensors")):
        raise BenchmarkError(f"{entrant.name} saved no adapter in {folder}")
    return Peaks(
        name=entrant.name,
        classes=settings.classes,
        round=round_,
        phases={phase: sum(found[phase] for found in of_ranks) for phase in PHASES},
        of_ranks=of_ranks,
    )


def table(found: Sequence[Peaks]) -> str:
    """Medians in MiB by contender; in brackets the median of ratios to the first one's."""
    classes = list(dict.fromkeys(one.classes for one in found))
    names = list(dict.fromkeys(one.name for one in found))
    lines = [
        f"| classes | contender | {' | '.join(PHASES)} |",
        f"| ---: | --- |{' ---: |' * len(PHASES)}",
    ]
    for count in classes:
        runs = {n: [one for one in found if (one.classes, one.name) == (count, n)] for n in names}
        first = runs[names[0]]
        for name in names:
            cells = []
            for phase in PHASES:
                most = [one.phases[phase] for one in runs[name]]
                ratio = median(
                    one / base.phases[phase] for one, base in zip(most, first, strict=True)
                )
                cells.append(f"{median(most) / MIB:,.0f} ({ratio:.2f})")
            lines.append(f"| {count:,} | {ENTRANTS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(
    settings: SessionSettings, names: Sequence[str], verify: bool, found: list[Peaks]
) -> None:
    """All rounds at one size of the vocabulary; `found` grows with every run.

    Raises:
        BenchmarkError: a run failed.
    """
    rows, plan, about = prepare("full", settings)
    print(f"{settings.classes:,} classes: {about}", file=sys.stderr)
    plan = replace(plan, evaluates=True, verifies=verify)
    for round_ in range(settings.rounds):
        for name in rotated(names, round_):
            folder = settings.output / f"round{round_ + 1}" / name
            one = peaks(ENTRANTS[name], plan, rows, settings, folder, round_ + 1)
            found.append(one)
            told = ", ".join(f"{phase} {size / MIB:,.0f}" for phase, size in one.phases.items())
            print(f"  round {round_ + 1} {name}: {told} MiB", file=sys.stderr)


def main(
    classes: Annotated[str, typer.Option(help="Sizes of the model's output.")] = "32000,128000",
    names: Annotated[str, typer.Option("--contenders")] = ",".join(CONTENDERS),
    output: Annotated[Path, typer.Option(help="A new folder.")] = Path("runs/memory_phases"),
    rounds: Annotated[int, typer.Option(min=1, help="Each runs every contender once.")] = 3,
    steps: Annotated[int, typer.Option(min=2)] = 3,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=32, help="A multiple of 32.")] = 512,
    length: Annotated[int, typer.Option(min=8, help="Tokens of every row.")] = 256,
    micro_batch: Annotated[int, typer.Option(min=1, help="Of training and evaluation.")] = 2,
    verify: Annotated[bool, typer.Option(help="anygauge checks what it saved.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one run.")] = 900,
) -> None:
    """Measure the peak of each phase side by side."""
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"--output {output} is not empty: name a new folder")
    asked = names.split(",")
    if unknown := [name for name in asked if name not in ENTRANTS]:
        raise typer.BadParameter(f"{unknown[0]!r}: choose from {', '.join(ENTRANTS)}")
    settings = SessionSettings(
        rounds=rounds,
        steps=steps,
        layers=layers,
        hidden=hidden,
        intermediate=round(hidden * 2.6875),
        heads=hidden // 16 if hidden < 128 else hidden // 64,
        length=length,
        max_length=length,
        micro_batch=micro_batch,
        dtype="bfloat16",
        stored="bfloat16",
        timeout_s=timeout,
        output=output.resolve(),
    )
    found: list[Peaks] = []
    try:
        for count in map(int, classes.split(",")):
            of_size = replace(settings, classes=count, output=settings.output / str(count))
            measure(of_size, asked, verify, found)
            found.sort(key=lambda one: (one.classes, asked.index(one.name), one.round))
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    shown = table(found)
    record = {**conditions(settings), "runs": [asdict(one) for one in found]}
    write_text(output / "results.json", json.dumps(record, indent=1) + "\n")
    write_text(output / "table.md", shown)
    print(shown)


if __name__ == "__main__":
    typer.run(main)
