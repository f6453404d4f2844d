"""Planned against measured time of a step on this machine: ``python -m benchmarks.plan_time``.

Measures the machine first (``anygauge plan --calibrate``), then plans each run and trains it with
``anygauge train``, one after the other. Rows are as long as a run takes them, and weights random.
Prints a Markdown table; the error of a run is planned over measured, less one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.rows import train_tokenizer
from benchmarks.texts import Text

STEPS, SKIPPED = 12, 3
"""Of each run; the first ones are not counted."""
WORDS = 500
PATIENCE_S = 600.0


def case(
    hidden: int,
    layers: int,
    length: int,
    micro_batch: int = 2,
    ranks: int = 1,
    *,
    strategy: Mapping[str, Any] | None = None,
    vocabulary: int = 2048,
    adapter: int | None = 8,
    dtype: str = "float32",
    keeps: bool = True,
    accumulation: int = 1,
) -> dict[str, Any]:
    """A run file, but for its data."""
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": 3 * hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": hidden // 64,
                "vocab_size": vocabulary,
                "max_position_embeddings": 2048,
            }
        },
        "adapter": None if adapter is None else {"r": adapter},
        "strategy": dict(strategy or {"name": "single" if ranks == 1 else "zero"}),
        "train": {
            "steps": STEPS,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * ranks * accumulation,
            "gradient_checkpointing": not keeps,
        },
        "precision": {"param_dtype": dtype},
        "launch": {"devices": ranks},
        "data": {"max_length": length},
    }


CASES: Mapping[str, dict[str, Any]] = {
    "wide": case(1024, 4, 256),
    "wide, all weights": case(1024, 4, 256, adapter=None),
    "wide, recomputed": case(1024, 4, 256, keeps=False),
    "wide, bfloat16": case(1024, 4, 256, dtype="bfloat16"),
    "wide, bfloat16, all weights": case(1024, 4, 256, adapter=None, dtype="bfloat16"),
    "deep": case(512, 16, 256),
    "deep, recomputed": case(512, 16, 256, keeps=False),
    "narrow": case(256, 8, 512, 4),
    "long": case(512, 4, 2048, 1),
    "long, recomputed": case(512, 4, 2048, 1, keeps=False),
    "short": case(512, 8, 64, 8),
    "many words": case(512, 4, 256, vocabulary=32_000),
    "several forwards": case(512, 4, 256, accumulation=4),
    "ddp": case(512, 8, 256, 2, 2, strategy={"name": "ddp"}),
    "ddp, all weights": case(512, 8, 256, 2, 2, strategy={"name": "ddp"}, adapter=None),
    "fsdp": case(512, 8, 256, 2, 2, strategy={"name": "fsdp"}),
    "fsdp, all weights": case(512, 8, 256, 2, 2, strategy={"name": "fsdp"}, adapter=None),
    "zero 2": case(512, 8, 256, 2, 2, strategy={"name": "zero", "stage": 2}),
    "zero 3": case(512, 8, 256, 2, 2),
    "zero 3, wide": case(1024, 4, 512, 2, 2),
    "tensor": case(1024, 4, 256, 2, 2, strategy={"name": "ddp", "tp": 2}),
}


def anygauge(arguments: list[str], environment: Mapping[str, str]) -> str:
    """What a command of the project prints."""
    done = subprocess.run(
        [sys.executable, "-m", "anygauge", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode:
        sys.exit(f"anygauge {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def measured(name: str, run: dict[str, Any], folder: Path, env: Mapping[str, str]) -> list[float]:
    """(planned seconds of a step, those of the middle one of a real run)."""
    path = folder / f"{name.replace(' ', '-').replace(',', '')}.yaml"
    model = {**run["model"], "tokenizer": str(folder / "tokenizer")}
    data = {**run["data"], "train": {"path": str(folder / "rows.jsonl")}, "cache": str(folder)}
    output = folder / path.stem
    whole = {**run, "name": "timed", "backend": "cpu", "output": str(output)}
    path.write_text(yaml.safe_dump({**whole, "model": model, "data": data}), encoding="utf-8")
    planned = json.loads(anygauge(["plan", str(path), "--json"], env))["time"]
    anygauge(["train", str(path), "--no-plan"], env)
    lines = (output / "timed" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    seconds = [one["seconds"] for one in records if "loss" in one]
    return [planned["step"], statistics.median(seconds[SKIPPED:])]


def rows(folder: Path) -> None:
    """A tokenizer, and rows longer than any run takes."""
    drawn = random.Random(0)
    words = [
        "".join(drawn.choices("aeioubcdfgklmnprst", k=drawn.randint(3, 8))) for _ in range(WORDS)
    ]
    texts = [" ".join(drawn.choices(words, k=4000)) for _ in range(64)]
    (folder / "tokenizer").mkdir()
    train_tokenizer([Text("", text) for text in texts], folder / "tokenizer", 2000)
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def table(names: list[str], folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Lines of Markdown, as they are found."""
    yield "| run | planned, ms | measured, ms | error |"
    yield "|---|---:|---:|---:|"
    errors = []
    for name in names:
        planned, took = measured(name, CASES[name], folder, env)
        errors.append(planned / took - 1)
        yield f"| {name} | {1e3 * planned:,.0f} | {1e3 * took:,.0f} | {errors[-1]:+.0%} |"
    yield f"\nMedian error of {len(errors)} runs: {statistics.median(map(abs, errors)):.1%}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of: {'; '.join(CASES)}")
    names = parser.parse_args().runs or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"no run is named {unknown[0]!r}; there are {'; '.join(CASES)}")
    with TemporaryDirectory() as made:
        folder = Path(made)
        env = {"XDG_CONFIG_HOME": made, "TQDM_DISABLE": "1"}
        rows(folder)
        print(anygauge(["plan", "--calibrate"], env), flush=True)
        for line in table(names, folder, env):
            print(line, flush=True)


if __name__ == "__main__":
    main()
