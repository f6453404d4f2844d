"""Seconds from a command to the end of its first step, beside peers, in alternation.

    python -m benchmarks.start_up --rounds 5 --before ../older --output runs/start_up

`--before` names a checkout of an older commit, whose code runs in this environment. The model is
tiny and there are two steps: what is measured is what happens before them. torchrun starts the
ranks of peers, as their documentation says. CPU seconds and imported modules are those of rank 0
from its start to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import session
from benchmarks.entrants import Entrant, chosen
from benchmarks.measure import RunOutcome, TableRow, in_order, middle, paired

CONTENDERS = ("anygauge-fsdp", "anygauge", "trainer")


def table_rows(found: Sequence[RunOutcome], entrants: Sequence[Entrant]) -> list[TableRow]:
    """Medians of each contender, and the paired ratio of its seconds to the first one's."""
    rows = []
    first = [start.first_step_s or 0.0 for start in in_order(found, entrants[0])]
    for entrant in entrants:
        starts = in_order(found, entrant)
        seconds = [start.first_step_s or 0.0 for start in starts]
        figures = {
            "s to the first step": middle(seconds),
            "over the first row": paired(seconds, first),
            "CPU s of a rank": middle(o.cpu_seconds for o in starts),
            "modules": middle(o.modules for o in starts),
        }
        rows.append(TableRow(case="", name=entrant.title, figures=figures))
    return rows


def main(
    context: typer.Context,
    output: session.Output = Path("runs/start_up"),
    rounds: session.Rounds = 5,
    names: Annotated[str, typer.Option("--contenders")] = ",".join(CONTENDERS),
    before: session.Older = None,
) -> None:
    """Measure how long a run takes to begin."""
    entrants = chosen(names, before)
    plan = session.planned(
        context, steps=2, layers=2, hidden=64, intermediate=172, heads=2, vocabulary=512, length=64,
        max_length=64, micro_batch=2, launched=True,
    )  # fmt: skip
    with session.command(output):
        rows, plan, _ = session.prepare("full", plan)
        found = [*session.each_run(entrants, plan, rows, output.resolve())]
        session.write_all(output, plan, table_rows(found, entrants), [asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
