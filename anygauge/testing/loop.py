"""The real loop on a backend, and the same run file on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from anygauge.config.strategies import section_of
from anygauge.interface import HOST_DEVICE
from anygauge.kernels.choose import ADAMW, choose_kernels
from anygauge.registry import Registry
from anygauge.testing.check import progress
from anygauge.testing.process import Subject
from anygauge.testing.watch import answer, answer_of, last_lines

MODULE = "anygauge.testing.loop"
TIMEOUT_S = 900.0
STEPS = 6
MIDDLE = 3
"""Steps between evaluations, and between checkpoints."""
MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 128,
    # Ten times the usual: attention then decides the losses, and a wrong one shows.
    "initializer_range": 0.2,
}
TEXT = (
    "a device is a plugin and the loop asks it for properties; rows of several lengths make batches"
    " of several shapes, and every rank has its part of them"
)
LOSS, NORM, EVALUATION = "loss", "grad_norm", "eval_loss"
"""What runs are compared by: fields of the records of ``metrics.jsonl``."""
ON_HOST = ("eager", "sdpa")
"""Attention of the model library that the host has too: both sides run the same one."""


class RunFailed(AssertionError):
    """A run ended with another status than 0; its message is what it printed.

    Attributes:
        folder: of the run.
    """

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run that ended well.

    Attributes:
        metrics: every record of ``metrics.jsonl``.
    """

    folder: Path
    metrics: Sequence[Mapping[str, Any]] = field(repr=False)

    @property
    def losses(self) -> list[float]:
        """Of every step, nats per loss token."""
        return [record[LOSS] for record in self.metrics if LOSS in record]

    @property
    def numbers(self) -> Mapping[tuple[str, int], float]:
        """Every loss, norm and evaluation, by its name and step from 1, in the order of training;
        of an evaluation, the steps done before it."""
        found = {
            (what, record["step"]): record[what]
            for record in self.metrics
            for what in (LOSS, NORM, EVALUATION)
            if what in record
        }
        # An evaluation comes after the update of its step, and before the next step.
        return dict(sorted(found.items(), key=lambda each: (each[0][1], each[0][0] == EVALUATION)))

    @property
    def checkpoints(self) -> Sequence[Path]:
        """Their folders, the earliest first."""
        return sorted((self.folder / "checkpoints").iterdir())


def _prepare(folder: Path) -> None:
    """Write rows and a tokenizer of bytes into a folder, unless they are there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer").exists():
        return
    words, symbols = TEXT.split(), ("<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder / "tokenizer")
    for name, numbers in (("rows", range(64)), ("held_out", range(64, 73))):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as rows:
            for number in numbers:
                row = [words[(number * 7 + at * 3) % len(words)] for at in range(2 + number % 9)]
                prompt, completion = " ".join(row[:2]) + " ", " ".join(row[2:]) or "so"
                rows.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def host_kernels(subject: Subject, *, adapter: bool) -> dict[str, str]:
    """Operation -> what the host must compute with to round as a backend does, by its formulas; of
    a process with the subject's variables, which may say where plugins are."""
    request = (subject.name, dict(subject.options), adapter)
    environment = {**os.environ, **subject.environment}
    return dict(answer_of(("-m", MODULE), request, environment, "the backend's kernels"))


def _kernels_for_both(name: str, options: Mapping[str, Any], adapter: bool) -> dict[str, str]:
    registry = Registry.load()
    backend = registry.create_backend(name, options)
    shared = ("linear_cross_entropy", *(["lora_linear"] if adapter else []))
    found = {}
    for operation, choice in choose_kernels(registry, backend, {}).items():
        spec = choice.provided.spec if choice.provided else None
        if operation == ADAMW and spec and spec.counterpart:
            found[operation] = spec.counterpart
        elif operation in shared and not (spec and spec.device_types):
            found[operation] = choice.name
    return found


def train(
    subject: Subject,
    folder: Path,
    name: str,
    *,
    strategy: str,
    ranks: int,
    dtype: str,
    host: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Trained:
    """Train the tiny model.

    Args:
        folder: for what runs need, and for their own folders.
        host: on the host's own backend instead, for comparison; attention and kernels that serve
            every device stay the subject's.
        changes: sections of the run file that replace the usual ones; of ``data`` and ``train``,
            fields.

    Raises:
        RunFailed: with what the run printed.
    """
    _prepare(folder)
    backend, given = subject.create(), dict(changes or {})
    # Where a strategy can choose how layers recompute, as the device needs.
    reentrant = backend.graph.reentrant_only and "reentrant" in section_of(strategy).model_fields
    run = {
        "name": name,
        "output": str(folder),
        "backend": HOST_DEVICE if host else subject.name,
        "backend_options": {} if host else dict(subject.options),
        "model": {
            "config": dict(MODEL),
            "tokenizer": str(folder / "tokenizer"),
            "attention": backend.attention if backend.attention in ON_HOST else ON_HOST[0],
        },
        "adapter": {"r": 4, "dropout": 0.0},
        "data": {
            "train": {"path": str(folder / "rows.jsonl")},
            "eval": {"path": str(folder / "held_out.jsonl")},
            "max_length": 96,
            "cache": "off",
            **given.pop("data", {}),
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "optimizer": {"lr": 2.0e-3},
            "eval_every": MIDDLE,
            "eval_at_start": True,
            **given.pop("train", {}),
        },
        "precision": {"param_dtype": dtype},
        "strategy": {"name": strategy, **({"reentrant": True} if reentrant and not host else {})},
        "launch": {"devices": ranks},
        **given,
    }
    if host:
        run["kernels"] = host_kernels(subject, adapter=run["adapter"] is not None)
    progress(f"{subject.name} in the loop: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **subject.environment},
    )
    if done.returncode:
        said = last_lines(done.stdout + done.stderr, 4)
        why = f"anygauge train ended with status {done.returncode}: {said}"
        raise RunFailed(why, folder / name)
    text = (folder / name / "metrics.jsonl").read_text(encoding="utf-8")
    return Trained(folder=folder / name, metrics=[json.loads(line) for line in text.splitlines()])


if __name__ == "__main__":
    answer(_kernels_for_both(*json.load(sys.stdin)))
