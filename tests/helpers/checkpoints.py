"""Checkpoints of a few bytes, for tests that need no run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import PARAMETER
from anygauge.training.checkpoints.files import write_checkpoint

HISTORY = {
    "step": 3,
    "first_loss": 2.0,
    "last_loss": 1.0,
    "tokens": 30,
    "seconds": 0.5,
    "evaluations": [{"step": 3, "name": "eval", "eval_loss": 0.5, "eval_tokens": 9}],
    "timed_steps": 2,
    "timed_tokens": 20,
    "timed_seconds": 0.25,
}
RECORD: dict[str, Any] = {
    "step": 3,
    "steps": 9,
    "world_size": 1,
    "loss": 0.5,
    "counters": {"updates": 3, "loss_scale": None, "good_steps": 0},
    "identity": {"train.seed": 0},
    "settings": {"train.steps": 9},
    "history": HISTORY,
    "data": {},
}


def exported(size: int = 6) -> Iterator[tuple[str, str, Tensor | None]]:
    """Two parameters, each with one moment."""
    for name in ("layer.0.weight", "layer.1.weight"):
        for kind in (PARAMETER, "exp_avg"):
            yield name, kind, torch.arange(float(size)) + len(kind)


def write(folder: Path, **options: Any) -> Path:
    """A checkpoint of the step that its folder's name has."""
    record = {**RECORD, "step": int(folder.name.removeprefix("step-"))}
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, exported(), record, [{"host": torch.zeros(4)}], **options)
    return folder
