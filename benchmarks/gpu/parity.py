"""The part `parity`: the same run on the device and on the host, step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.context import Clock, Context
from benchmarks.gpu.result import Report
from benchmarks.rows import write_rows
from benchmarks.table import TableRow

STEPS = 6
ALLOWED: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 3e-2}
"""Relative difference of a step's loss that is not a fault: rounding that grows with the steps."""
NORMS = 3.0
"""Gradients' norms may differ by this multiple of it."""
FIGURES = ("loss", "grad_norm")


def run(context: Context, report: Report) -> None:
    """Losses and norms of gradients, in float32 and, where the device has it, bfloat16.

    Raises:
        RuntimeError: a run failed, or differs by more than is allowed.
    """
    clock = Clock(context.seconds)
    rows = write_rows(
        "generated", context.path, data=None, count=STEPS * 4, length=96, vocabulary=400, seed=0
    )
    apart = []
    for dtype in ("float32",) if context.tiny else ALLOWED:
        found = {}
        for device in dict.fromkeys((context.device, "cpu")):
            fields = run_file(context.path, rows.pool, device, dtype, rows.vocabulary)
            found[device] = steps(context.path, fields, clock.left)
        mine = found[context.device]
        for figure in FIGURES:
            allowed = ALLOWED[dtype] * (NORMS if figure == "grad_norm" else 1.0)
            off = max(
                abs(a[figure] / b[figure] - 1) for a, b in zip(mine, found["cpu"], strict=True)
            )
            report.add(
                TableRow(
                    case=dtype,
                    name=figure,
                    figures={
                        f"first on {context.device}": mine[0][figure],
                        "first on the host": found["cpu"][0][figure],
                        f"last on {context.device}": mine[-1][figure],
                        "last on the host": found["cpu"][-1][figure],
                        "largest difference": off,
                        "allowed": allowed,
                    },
                )
            )
            if not off <= allowed:
                apart.append(f"{dtype}, {figure}: {off:.1e} of {allowed:.0e}")
    if apart:
        raise RuntimeError(f"the device's run differs from the host's: {'; '.join(apart)}")


def run_file(folder: Path, rows: Path, device: str, dtype: str, vocabulary: int) -> dict[str, Any]:
    """A small Llama with random weights, trained on one rank."""
    return {
        "name": f"{device}-{dtype}",
        "output": str(folder),
        "backend": device,
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 344,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": vocabulary,
                "max_position_embeddings": 256,
            },
            "tokenizer": str(folder / "model"),
        },
        "adapter": None,
        "data": {
            "train": {
                "path": str(rows), "format": "prompt_completion", "template": "{prompt}"
            },
            "max_length": 96,
            "cache": "off",
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "optimizer": {"lr": 1e-3},
        },
        "precision": {"param_dtype": dtype},
        "strategy": {"name": "single"},
    }  # fmt: skip


def steps(folder: Path, fields: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Train as a run file says; returns the records of its steps.

    Raises:
        RuntimeError: the run failed.
    """
    path = folder / f"{fields['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(fields), sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", "train", str(path), "--no-plan"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(1.0, seconds),
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(f"{path.name}: anygauge train ended with status {done.returncode}")
    metrics = folder / str(fields["name"]) / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "loss" in record]
