"""Checkpoints of a few bytes, for tests that need no run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.config.schema import CheckpointSection
from anygauge.interface import PARAMETER, Collectives, Counters
from anygauge.training.checkpoints.checkpoint_files import write_checkpoint
from anygauge.training.checkpoints.manager import CheckpointManager
from anygauge.training.checkpoints.sound import digest_of

ALONE = Collectives("none")
"""No group was joined: this rank is all there is."""

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


def write(folder: Path, record: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """A checkpoint of the step that its folder's name has; `record` has other fields of it."""
    fields = {**RECORD, "step": int(folder.name.removeprefix("step-")), **(record or {})}
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, exported(), fields, [{"host": torch.zeros(4)}], **options)
    return folder


def reseal(folder: Path, name: str, content: bytes | None) -> None:
    """Change or remove a file so that the manifest agrees: the work of a person, not of a kill."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if content is None:
        del manifest["files"][name]
    else:
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "sha256": digest_of(folder / name)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class FakeEngine:
    """Exports two tensors, as an engine does after three updates."""

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        return exported()

    def counters(self) -> Counters:
        return Counters(updates=3)


class FakeBackend:
    """Of a rank that is alone."""

    collectives = ALONE

    class placement:
        """Has one generator."""

        @staticmethod
        def rng_state() -> dict[str, Tensor]:
            return {"host": torch.zeros(4)}


OF_THE_RUN = ("steps", "world_size", "identity", "settings", "history", "data")


def a_manager(folder: Path, section: Mapping[str, Any] | None = None, **parts: Any) -> Any:
    """Of a run in `folder` with `section` of its run file; alone, unless `parts` say otherwise."""
    made: Any = CheckpointManager
    usual = {
        "engine": FakeEngine(),
        "backend": FakeBackend(),
        "rank": 0,
        "record": lambda step: {name: RECORD[name] for name in OF_THE_RUN},
        "export_adapter": None,
        "log": lambda text: None,
    }
    checked = CheckpointSection(**(section or {}))
    return made(section=checked, run_directory=folder, **(usual | parts))
