"""Measures a GPU: ``make gpu`` (at most 8 minutes), ``make gpu-full``; see docs/gpu.md.

python -m benchmarks.gpu --output runs/gpu
python -m benchmarks.gpu --full --gpus 4
python -m benchmarks.gpu --device cpu            # try the parts without a card
python -m benchmarks.gpu --predict h100:1        # what the planner expects
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu.machine import described, foreseen
from benchmarks.gpu.part import OK, PARTS, SKIPPED, Context, Report, names
from benchmarks.gpu.runner import run_parts, write
from benchmarks.processes import raise_when_terminated
from benchmarks.session import command

QUICK_S, FULL_S = 450.0, 5400.0
"""8 minutes with the start, and an hour and a half."""

console = Console(highlight=False, soft_wrap=True)


def chosen(parts: str, *, full: bool, predict: bool) -> list[str]:
    """Names of parts, in their order.

    Raises:
        typer.BadParameter: there is no such part.
    """
    listed = [name.strip() for name in parts.split(",") if name.strip()]
    unknown = [name for name in listed if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"--parts {unknown[0]}: choose from {', '.join(PARTS)}")
    found = [name for name in PARTS if name in listed] if listed else names(full)
    return [name for name in found if not predict or ".training:" in PARTS[name].run]


def hosts_of(path: Path | None) -> tuple[str, int]:
    """(absolute path, machines) of a host file, one machine a line.

    Raises:
        typer.BadParameter: it cannot be read, or lists no machine.
    """
    if path is None:
        return "", 1
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise typer.BadParameter(f"--hosts {path} cannot be read: {error}") from error
    if not any(lines):
        raise typer.BadParameter(f"--hosts {path} lists no machine: one a line, `node1 slots=8`")
    return str(path.resolve()), sum(1 for line in lines if line)


def main(
    full: Annotated[bool, typer.Option("--full", help="All parts.")] = False,
    device: Annotated[str, typer.Option(help="cuda; cpu tries the parts, at tiny sizes.")] = "cuda",
    gpus: Annotated[int, typer.Option(min=1, help="Cards of each machine to use.")] = 1,
    hosts: Annotated[
        Path | None, typer.Option(help="A host file of several machines (anygauge's ssh launcher).")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help=f"For all parts; 0: {QUICK_S:g}, with --full {FULL_S:g}.")
    ] = 0.0,
    parts: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PARTS)}.")] = "",
    predict: Annotated[
        str, typer.Option(help="A machine as `anygauge plan --machine` takes it; nothing runs.")
    ] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes on a GPU, too.")] = False,
    output: Annotated[Path, typer.Option(help="A new folder.")] = Path("runs/gpu"),
) -> None:
    """Check a GPU and measure it, each figure beside its prediction."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device {device!r} is neither cuda nor cpu")
    hostfile, nodes = hosts_of(hosts)
    wanted = chosen(parts, full=full, predict=bool(predict))
    with command(output):
        machine = foreseen(predict) if predict else described(device, gpus)
    output.mkdir(parents=True, exist_ok=True)
    context = Context(
        device=device,
        folder=str(output.resolve()),
        seconds=0.0,
        gpus=gpus,
        hostfile=hostfile,
        nodes=nodes,
        tiny=tiny or device == "cpu",
        full=full,
        machine=predict,
        card="" if predict or device == "cpu" else machine["card"],
    )
    results: list[Report] = []

    def ended(result: Report) -> None:
        results.append(result)
        write(output, machine, results)
        told = f"{result.status}: {result.problem}" if result.problem else result.status
        console.print(
            f"{result.title}: {told} ({result.seconds:.0f} of {result.allowed:.0f} s)",
            style=None if result.status in (OK, SKIPPED) else "red",
            markup=False,
        )

    console.print(f"{machine['card']}: {', '.join(wanted)}", markup=False)
    run_parts(wanted, context, seconds or (FULL_S if full else QUICK_S), ended=ended)
    console.print(f"written: {output}/page.md and results.json", markup=False)
    if any(result.status not in (OK, SKIPPED) for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    raise_when_terminated()
    typer.run(main)
