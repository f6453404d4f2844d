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
from anygauge.interface import HOST_DEVICE, Backend
from anygauge.kernels.choose import ADAMW, choose_kernels
from anygauge.registry import Registry
from anygauge.testing.check import progress
from anygauge.testing.process import Subject, answer_of, last_lines

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
WORDS = TEXT.split()
LOSS, NORM, EVALUATION = "loss", "gradient's norm", "evaluation"
Key = tuple[str, int]
"""One of these, and its step of training from 1; of an evaluation, the steps done before it."""
FIELDS = {LOSS: "loss", NORM: "grad_norm", EVALUATION: "eval_loss"}
"""Of the records of ``metrics.jsonl``."""
ON_HOST = ("eager", "sdpa")
"""Attention of the model library that the host has too: both sides run the same one."""


class RunFailed(AssertionError):
    """A run ended with another status than 0; its message is what it printed.

    Attributes:
        folder: of the run; None where it is not known.
    """

    def __init__(self, message: str, folder: Path | None = None) -> None:
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
        return [record["loss"] for record in self.metrics if "loss" in record]

    @property
    def numbers(self) -> Mapping[Key, float]:
        """Every loss, norm and evaluation, in the order of training."""
        found = {
            (what, record["step"]): record[field]
            for record in self.metrics
            for what, field in FIELDS.items()
            if field in record
        }
        # An evaluation comes after the update of its step, and before the next step.
        return dict(sorted(found.items(), key=lambda each: (each[0][1], each[0][0] == EVALUATION)))

    @property
    def checkpoints(self) -> Sequence[Path]:
        """Their folders, the earliest first."""
        return sorted((self.folder / "checkpoints").iterdir())


def prepare(folder: Path) -> None:
    """Write rows and a tokenizer of bytes into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ("<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()))
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
                words = [WORDS[(number * 7 + at * 3) % len(WORDS)] for at in range(2 + number % 9)]
                prompt, completion = " ".join(words[:2]) + " ", " ".join(words[2:]) or "so"
                rows.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def kernels_for_both(name: str, options: Mapping[str, Any], adapter: bool) -> dict[str, str]:
    """Operation -> what the host must compute with to round as a backend does, by its formulas."""
    registry = Registry.load()
    found: dict[str, str] = {}
    for each, choice in choose_kernels(
        registry, registry.create_backend(name, options), {}
    ).items():
        spec = choice.provided and choice.provided.spec
        if each == ADAMW:
            found |= {each: spec.counterpart} if spec and spec.counterpart else {}
        elif each in ("linear_cross_entropy", *(["lora_linear"] if adapter else [])):
            found |= {} if spec and spec.device_types else {each: choice.name}
    return found


def host_kernels(subject: Subject, *, adapter: bool) -> dict[str, str]:
    """The same, of a process with the subject's variables: they may say where plugins are."""
    request = (subject.name, dict(subject.options), adapter)
    environment = {**os.environ, **subject.environment}
    return dict(answer_of(kernels_for_both, request, environment, "the backend's kernels"))


def _strategy(name: str, backend: Backend, *, host: bool) -> dict[str, Any]:
    """The section of a strategy; where it can choose how layers recompute, as the device needs."""
    reentrant = backend.graph.reentrant_only and not host
    chosen = reentrant and "reentrant" in section_of(name).model_fields
    return {"name": name, **({"reentrant": True} if chosen else {})}


def train(
    subject: Subject,
    folder: Path,
    name: str,
    *,
    strategy: str,
    ranks: int,
    dtype: str,
    host: bool = False,
    arguments: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Trained:
    """Train the tiny model; `prepare` has been called.

    Args:
        host: on the host's own backend instead, for comparison; attention and kernels that serve
            every device stay the subject's.
        changes: sections of the run file that replace the usual ones; of ``data`` and ``train``,
            fields.

    Raises:
        RunFailed: with what the run printed.
    """
    backend = subject.create()
    given = dict(changes or {})
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
        "strategy": _strategy(strategy, backend, host=host),
        "launch": {"devices": ranks},
        **given,
    }
    if host:
        run["kernels"] = host_kernels(subject, adapter=run["adapter"] is not None)
    progress(f"{subject.name} in the loop: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", "train", str(path), *arguments],
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
