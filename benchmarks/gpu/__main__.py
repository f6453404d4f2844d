"""Measures a GPU: ``make gpu`` (at most 8 minutes), ``make gpu-full``; see docs/gpu.md.

python -m benchmarks.gpu --output runs/gpu
python -m benchmarks.gpu --full --gpus 4
python -m benchmarks.gpu --device cpu            # try the parts without a card
python -m benchmarks.gpu --predict h100:1        # what the planner expects
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.contender_plan import BenchmarkError
from benchmarks.contender_processes import raise_when_terminated
from benchmarks.gpu.install import OLDEST_TORCH
from benchmarks.gpu.part import OK, PARTS, SKIPPED, Context, Report, names, run_parts, write
from benchmarks.session import command, versions

LOOK = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "cards": []}
if torch.version.cuda is not None and torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found["cards"].append([card.name, card.total_memory, [card.major, card.minor]])
print(json.dumps(found))
"""


REMEDY = (
    "`make gpu DEVICE=cpu` tries the parts on this machine's processor; "
    "`make gpu PREDICT=h100:1` shows what is predicted for a card"
)


def look() -> dict[str, Any]:
    """What torch sees, in a process of its own: the parts' memory is theirs alone."""
    argv = [sys.executable, "-c", LOOK]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"torch cannot be used:\n{done.stderr.strip()[-1000:]}\n{REMEDY}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def described(device: str, gpus: int, predict: str = "") -> dict[str, Any]:
    """The page's first table; that of a page of predictions, where a machine is named."""
    record = {"command": " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]), **versions()}
    if predict:
        return {"card": f"Predictions for {predict}", **record}
    found = look()
    card: dict[str, Any] = {"card": "This machine's processor"}
    if device != "cpu":
        _check(found, gpus)
        name, memory, capability = found["cards"][0]
        card = {
            "card": name,
            "cards": gpus,
            "memory, GiB": memory / 2**30,
            "compute capability": ".".join(map(str, capability)),
            "CUDA of torch": found["cuda"],
        }
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**card, **system, **record}


def _check(found: Mapping[str, Any], gpus: int) -> None:
    torch, cards = found["torch"], len(found["cards"])
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        raise BenchmarkError(
            f"torch {torch} is installed, and 2.11 or newer is needed: `rm -rf .venv` and "
            "`make gpu`, or `make gpu WHEELS=folder PYTHON=interpreter` beside a newer torch. "
            f"{REMEDY}"
        )
    if not cards:
        why = "is built without CUDA" if found["cuda"] is None else "sees no usable card"
        raise BenchmarkError(
            f"there is no NVIDIA card to measure: torch {torch} {why}. `anygauge doctor "
            f"--backend cuda` shows what is missing. {REMEDY}"
        )
    if gpus > cards:
        raise BenchmarkError(f"GPUS={gpus}, but torch sees {cards}. {REMEDY}")


QUICK_S, FULL_S = 450.0, 5400.0
"""8 minutes with the start, and an hour and a half."""


def chosen(parts: str, *, full: bool, predict: bool) -> list[str]:
    """Names of parts, in their order."""
    listed = [name.strip() for name in parts.split(",") if name.strip()]
    unknown = [name for name in listed if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"--parts {unknown[0]}: choose from {', '.join(PARTS)}")
    found = [name for name in PARTS if name in listed] if listed else names(full)
    predicted = (n for n in found if ".training:" in PARTS[n].run and n != "parity")
    return list(predicted) if predict else found


def hosts_of(path: Path | None) -> tuple[str, int]:
    """(absolute path, machines) of a host file, one machine a line."""
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
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="cpu tries the parts, at tiny sizes.")
    ] = "cuda",
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
    hostfile, nodes = hosts_of(hosts)
    wanted = chosen(parts, full=full, predict=bool(predict))
    with command(output):
        machine = described(device, gpus, predict)
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
    typer.echo(f"{machine['card']}: {', '.join(wanted)}")
    for result in run_parts(wanted, context, seconds or (FULL_S if full else QUICK_S)):
        results.append(result)
        write(output, machine, results)
        told = f"{result.status}: {result.problem}" if result.problem else result.status
        typer.secho(
            f"{result.title}: {told} ({result.seconds:.0f} of {result.allowed:.0f} s)",
            fg=None if result.status in (OK, SKIPPED) else "red",
        )
    typer.echo(f"written: {output}/page.md and results.json")
    if any(result.status not in (OK, SKIPPED) for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    raise_when_terminated()
    typer.run(main)
