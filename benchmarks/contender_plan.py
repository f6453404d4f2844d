"""What every contender of one workload gets: the same model, rows, batch and optimizer.

Torch-free. The parent writes it as JSON, each contender reads it from the path it is given.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Layout = Literal["padded", "grouped", "packed"]
Dtype = Literal["float32", "bfloat16"]


class BenchmarkError(Exception):
    """For the user: shown without a traceback; says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContenderPlan:
    """One run of one contender; first what `prepare` and `run_once` fill in.

    Attributes:
        model: folder with config, weights and tokenizer.
        rows: JSON Lines of `text`, or of `prompt` and `completion`; no row exceeds `max_length`.
        has_prompts: whether rows are prompt and completion; only completions have a loss then.
        output: folder for what this run writes; before that, for all that is written.
        layout: rows padded in random order, rows of like length together, or rows packed.
        deepspeed: whether a trainer shards with DeepSpeed's ZeRO-3.
        steps: optimizer steps, warm-up included.
        accumulation: micro-batches of `micro_batch` sequences per rank and step.
        length: tokens of each row of the workload `full`.
        max_length: most tokens of a row, and the capacity of a pack.
        classes: of the model's output, if they are to be more.
        kv_heads: of keys and values; 0: as many as heads.
        stored: type of the model's file.
        device: torch's name of the device type, which is also anygauge's name of the backend.
        evaluates: after training, evaluate on the same rows and save the adapter; the peak of each
            phase is recorded (see `shim/benchmark_watch.py`).
        plans_memory: anygauge plans a run's memory before it starts its ranks.
        watched: last steps that are watched instead of measured (see `shim/benchmark_watch.py`).
        hostfile: of the machines where they are several, for anygauge's own launcher; else empty.
        nodes: machines, each with an equal part of `ranks`.
        data: folder with the files of workloads; empty: there is none.
        launched: torchrun starts the ranks of peers, as their users do; otherwise they are started
            here, with nothing in between.
    """

    model: str = ""
    rows: str = ""
    has_prompts: bool = False
    output: str = ""
    layout: Layout = "padded"
    deepspeed: bool = True
    compiled: bool = False

    steps: int
    warmup: int = 1
    ranks: int = 2
    micro_batch: int
    accumulation: int = 1
    length: int = 0
    max_length: int
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocabulary: int = 4096
    classes: int = 0
    stored: Dtype = "float32"
    dtype: Dtype = "float32"
    checkpointing: bool = True
    lora_rank: int = 16
    lora_alpha: int = 32
    lr: float = 1e-3
    max_norm: float = 1.0
    seed: int = 0
    device: str = "cpu"
    evaluates: bool = False
    verifies: bool = True
    plans_memory: bool = True
    watched: int = 0
    hostfile: str = ""
    nodes: int = 1
    data: str = ""
    launched: bool = False
    rounds: int = 1
    timeout_s: float = 600

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def llama(self) -> dict[str, Any]:
        """The model, as a run file's ``model.config``."""
        return {
            "model_type": "llama",
            "vocab_size": self.classes or self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": False,
        }

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> ContenderPlan:
        """Read what `save` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
