"""Seconds from a command to the end of its first step, beside peers, in alternation.

    python benchmarks/start_up.py --rounds 5 --before ../older --output runs/start_up

`--before` names a checkout of an older commit, whose code runs in this environment. The model is
tiny and there are two steps: what is measured is what happens before them. CPU seconds and imported
modules are those of rank 0 from its start to its end.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from anygauge.util.files import write_text
from benchmarks.entrants import ENTRANTS, Entrant
from benchmarks.errors import BenchmarkError
from benchmarks.measure import anygauge_steps, contender_steps
from benchmarks.plan import ContenderPlan
from benchmarks.ratios import rotated
from benchmarks.rows import WrittenRows
from benchmarks.session import SessionSettings, prepare, run_once

CONTENDERS = ("anygauge-fsdp", "anygauge", "trainer")
OF_A_CHECKOUT = ("", "kernels", "backends", "launchers")
BEFORE = "before: "


@dataclass(frozen=True, slots=True)
class StartUp:
    """One start.

    Attributes:
        seconds: from the command to the end of the first step.
        cpu_seconds, modules: of rank 0.
    """

    name: str
    seconds: float
    cpu_seconds: float
    modules: int


@contextmanager
def _code_of(checkout: Path | None) -> Iterator[None]:
    """Have new processes import anygauge from a checkout."""
    usual = dict(os.environ)
    if checkout is not None:
        folders = [str(checkout / part) for part in OF_A_CHECKOUT]
        before = filter(None, [usual.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *before])
        os.environ["PYTHONSAFEPATH"] = "1"  # or the folder that it is started in comes first
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(usual)


def start(
    name: str,
    entrant: Entrant,
    plan: ContenderPlan,
    rows: WrittenRows,
    settings: SessionSettings,
    folder: Path,
) -> StartUp:
    """Run a contender once.

    Raises:
        BenchmarkError: it failed.
    """
    began = time.time()
    result = run_once(entrant, plan, rows, settings, folder=folder, round_=1)
    if result.status != "ok":
        log = "\n".join(result.log)
        raise BenchmarkError(f"{name}: {result.status}: {result.problem}\n{log}")
    steps = anygauge_steps(folder) if entrant.module is None else contender_steps(folder, 0)
    trace = json.loads((folder / "traffic-rank0.json").read_text(encoding="utf-8"))
    return StartUp(name, steps.times[0] - began, trace["cpu_seconds"], trace["modules"])


def table(found: Sequence[StartUp]) -> str:
    """Medians of each contender, and the paired ratio of its seconds to the first one's."""
    rounds: dict[str, list[StartUp]] = {}
    for one in found:
        rounds.setdefault(one.name, []).append(one)
    first = next(iter(rounds.values()))
    lines = [
        "| contender | s to the first step | over the first row | CPU s of a rank | modules |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, starts in rounds.items():
        ratios = [one.seconds / base.seconds for one, base in zip(starts, first, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(one.seconds for one in starts):.1f} | "
            f"{statistics.median(ratios):.2f} | "
            f"{statistics.median(one.cpu_seconds for one in starts):.1f} | "
            f"{round(statistics.median(one.modules for one in starts)):,} |"
        )
    return "\n".join(lines) + "\n"


def contenders(names: str, before: Path | None) -> Mapping[str, tuple[Entrant, Path | None]]:
    """Title -> the contender, and the checkout that it runs.

    Raises:
        typer.BadParameter: there is no such contender.
    """
    found: dict[str, tuple[Entrant, Path | None]] = {}
    for name in names.split(","):
        if name not in ENTRANTS:
            raise typer.BadParameter(f"{name!r}: choose from {', '.join(ENTRANTS)}")
        entrant = ENTRANTS[name]
        found[entrant.title] = entrant, None
        if before is not None and entrant.module is None:
            found[BEFORE + entrant.title] = entrant, before.resolve()
    return found


def main(
    output: Annotated[Path, typer.Option(help="A new folder.")] = Path("runs/start_up"),
    rounds: Annotated[int, typer.Option(min=1, help="Each starts every contender once.")] = 5,
    names: Annotated[str, typer.Option("--contenders")] = ",".join(CONTENDERS),
    before: Annotated[
        Path | None, typer.Option(help="A checkout of an older commit.", exists=True)
    ] = None,
) -> None:
    """Measure how long a run takes to begin."""
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"--output {output} is not empty: name a new folder")
    asked = contenders(names, before)
    settings = SessionSettings(
        steps=2,
        layers=2,
        hidden=64,
        intermediate=172,
        heads=2,
        vocabulary=512,
        length=64,
        max_length=64,
        micro_batch=2,
        output=output.resolve(),
    )
    found: list[StartUp] = []
    try:
        rows, plan, _ = prepare("full", settings)
        for round_ in range(rounds):
            for title in rotated(list(asked), round_):
                entrant, checkout = asked[title]
                folder = settings.output / f"round{round_ + 1}" / title.replace(" ", "-")
                with _code_of(checkout):
                    one = start(title, entrant, plan, rows, settings, folder)
                found.append(one)
                print(f"  round {round_ + 1} {title}: {one.seconds:.1f} s", file=sys.stderr)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    order = list(asked)
    found.sort(key=lambda one: order.index(one.name))
    shown = table(found)
    write_text(output / "table.md", shown)
    write_text(output / "results.json", json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(shown)


if __name__ == "__main__":
    typer.run(main)
