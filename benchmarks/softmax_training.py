"""Trains with a softmax in bfloat16, with one in float32, and all in float32, over several seeds.

    ANYGAUGE_DATA=FOLDER python benchmarks/softmax_training.py --output runs/softmax_training

A small model learns all its weights on GSM8K (or on generated rows without the data); the figure is
the loss of held-out rows at the end. Seeds change initial weights and the order of rows alike for
all; runs of one seed follow each other, beginning one further on with each seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from anygauge.util.files import write_text
from benchmarks.entrants import run_file
from benchmarks.plan import ContenderPlan
from benchmarks.processes import ROOT
from benchmarks.ratios import rotated
from benchmarks.session import SessionSettings, prepare

HELD_OUT = 64

WAYS: Mapping[str, dict[str, Any]] = {
    "softmax in bfloat16": {"kernels": {"attention": "softmax"}},
    "softmax in float32": {"model": {"attention": "eager"}},
    "all in float32": {"precision": {"param_dtype": "float32"}, "model": {"attention": "eager"}},
}
"""Weights, activations and products are bfloat16 in the first two; the first one's softmax takes
and gives bfloat16, accumulated in float32."""


def main(
    output: Annotated[Path, typer.Option(help="A new folder.")] = Path("runs/softmax_training"),
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 120,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    hidden: Annotated[int, typer.Option(min=16)] = 192,
    vocabulary: Annotated[int, typer.Option(min=300)] = 2048,
    max_length: Annotated[int, typer.Option(min=32)] = 256,
) -> None:
    """Print final losses in Markdown, and write them."""
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"--output {output} is not empty: name a new folder")
    data = os.environ.get("ANYGAUGE_DATA")
    workload = "gsm8k" if data else "generated"
    settings = SessionSettings(
        rounds=1, steps=steps, warmup=1, ranks=1, layers=layers, hidden=hidden,
        intermediate=hidden * 3, heads=6, vocabulary=vocabulary, classes=0, length=max_length,
        max_length=max_length, micro_batch=batch, accumulation=1, dtype="bfloat16",
        checkpointing=False, lr=1e-3, seed=0, timeout_s=3600, output=output.resolve(),
        data=Path(data) if data else None,
    )  # fmt: skip
    rows, plan, about = prepare(workload, settings)
    lines = Path(rows.pool).read_text(encoding="utf-8").splitlines(keepends=True)
    training, held_out = output / "train.jsonl", output / "held_out.jsonl"
    training.write_text("".join(lines[:-HELD_OUT]), encoding="utf-8")
    held_out.write_text("".join(lines[-HELD_OUT:]), encoding="utf-8")
    console = Console(highlight=False, width=120)
    console.print(f"{about}; {len(lines) - HELD_OUT} rows to train on, {HELD_OUT} held out")
    losses: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(seeds):
        for name in rotated(list(WAYS), seed):
            folder = output / f"{list(WAYS).index(name)}-seed{seed}"
            given = replace(
                plan, seed=seed, rows=str(training.resolve()), output=str(folder.resolve())
            )
            losses[name].append(final_loss(given, WAYS[name], held_out.resolve(), folder))
            console.print(f"  seed {seed}, {name}: {losses[name][-1]:.4f}")
    write_text(output / "losses.json", json.dumps(losses, indent=2))
    for line in table(losses):
        console.print(line, soft_wrap=True)


def final_loss(plan: ContenderPlan, way: Mapping[str, Any], held_out: Path, folder: Path) -> float:
    """Train once; returns the mean loss per token of the held-out rows, in nats."""
    folder.mkdir(parents=True)
    run = run_file(plan, {"name": "zero", "stage": 3})
    del run["adapter"]
    written = json.loads((Path(plan.model) / "config.json").read_text(encoding="utf-8"))
    model = {k: v for k, v in written.items() if k not in ("architectures", "dtype")}
    # From a configuration, so that the seed draws the weights as well.
    run["model"] = {"config": model, "tokenizer": plan.model, **way.get("model", {})}
    run["data"]["eval"] = {**run["data"]["train"], "path": str(held_out)}
    run["train"]["schedule"] = {"name": "cosine"}
    run["precision"] = {**run["precision"], **way.get("precision", {})}
    run["kernels"] = way.get("kernels", {})
    run["strategy"] = {"name": "single"}
    run["checkpoint"] = {"every": 0}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", "train", str(path), "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise typer.BadParameter(f"{path}: {done.stderr[-2000:]}")
    lines = (Path(plan.output) / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return float([each["eval_loss"] for each in found if "eval_loss" in each][-1])


def table(losses: Mapping[str, list[float]]) -> list[str]:
    """Markdown: a row for each way, with its distance from float32's softmax seed by seed."""
    reference = losses["softmax in float32"]
    seeds = range(len(reference))
    lines = [
        "| " + " | ".join(["", *(f"seed {s}" for s in seeds), "mean", "difference"]) + " |",
        "| --- " + "| ---: " * (len(reference) + 2) + "|",
    ]
    for name, found in losses.items():
        apart = [a - b for a, b in zip(found, reference, strict=True)]
        told = "" if found is reference else f"{fmean(apart):+.4f} ± {stdev(apart):.4f}"
        cells = [name, *(f"{loss:.4f}" for loss in found), f"{fmean(found):.4f}", told]
        lines.append("| " + " | ".join(cells) + " |")
    spread = stdev(reference)
    lines.append(f"\nStandard deviation of float32's softmax over seeds: {spread:.4f}")
    return lines


if __name__ == "__main__":
    typer.run(main)
