"""Runs whose memory others have published, as run files of ours; what is said of each, and where.

Run as a script, it plans all and prints the table of docs/planning.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from anygauge.config.load import load_run_file
from anygauge.planning.fit import Fit, fit
from anygauge.planning.machines import Hardware
from anygauge.planning.memory import RunMemory
from anygauge.planning.plan import plan_run
from anygauge.registry import Registry
from tests.helpers.sizes import LLAMA_70B

GB, GIB = 10**9, 2**30
LOGITS = {"linear_cross_entropy": "reference"}
"""Their losses hold all logits."""
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}
"""The sizes of the first Qwen, whose code transformers does not have."""
QWEN_14B = {
    **QWEN_7B,
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 152064,
}
QWEN_72B = {
    **QWEN_7B,
    "hidden_size": 8192,
    "intermediate_size": 24576,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 152064,
}
PHI_4 = {
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
}
GPT_J = {
    "model_type": "gptj",
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "vocab_size": 50400,
    "n_positions": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run.

    Attributes:
        said: bytes of one device; None where the source says only whether it fits.
        fits: what the source says of it.
        where: the source, in words.
    """

    name: str
    config: Mapping[str, Any]
    card: str
    ranks: int
    said: float | None = None
    fits: bool = True
    where: str
    length: int = 2048
    micro_batch: int = 1
    adapter: Mapping[str, Any] | None = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "zero"})
    model: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=lambda: LOGITS)
    train: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)

    def run_file(self) -> dict[str, Any]:
        return {
            "model": {"config": dict(self.config), "tokenizer": "none", **self.model},
            "data": {"train": {"path": "rows.jsonl"}, "max_length": self.length},
            "adapter": None if self.adapter is None else dict(self.adapter),
            "strategy": dict(self.strategy),
            "kernels": dict(self.kernels),
            "precision": dict(self.precision),
            "train": {
                "steps": 2,
                "micro_batch_size": self.micro_batch,
                "global_batch_size": self.micro_batch * self.ranks,
                **self.train,
            },
        }


PEFT = "peft's guides of DeepSpeed and FSDP: 70B, r 8, all linear layers, 8 rows of 2048"
QWEN = "Qwen's first README: LoRA, r 64, one row"
ALL = "all-linear"


def qwen(size: str, config: Mapping[str, Any], length: int, said: float) -> Published:
    return Published(
        name=f"qwen-{size}-{length}",
        config=config,
        card="a100-80",
        ranks=1,
        said=said * GB,
        where=QWEN,
        length=length,
        adapter={"r": 64, "targets": ALL},
        strategy={"name": "single"},
        train={"gradient_checkpointing": True},
    )


RUNS = [
    Published(
        name="gaudi2-70b-lora",
        config=LLAMA_70B,
        card="gaudi2",
        ranks=8,
        said=73.9 * GIB,
        where="a product page of LoRA on HLS-2: 73.9 of 94.6 GB, with the graphs' workspace",
        micro_batch=10,
        adapter={"r": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
    Published(
        name="gaudi2-70b-full",
        config=LLAMA_70B,
        card="gaudi2",
        ranks=8,
        fits=False,
        where="the same: all weights, 140 + 140 + 840 GB",
        adapter=None,
        precision={"reduce_dtype": "param_dtype"},
    ),
    Published(
        name="peft-70b-zero3",
        config=LLAMA_70B,
        card="h100",
        ranks=8,
        said=64 * GB,
        where=PEFT,
        micro_batch=8,
        adapter={"r": 8, "targets": ALL},
    ),
    Published(
        name="peft-70b-fsdp",
        config=LLAMA_70B,
        card="h100",
        ranks=8,
        said=76 * GB,
        where=f"{PEFT}: 72 to 80 GB",
        micro_batch=8,
        adapter={"r": 8, "targets": ALL},
        strategy={"name": "fsdp"},
    ),
    Published(
        name="torchtune-70b",
        config={**LLAMA_70B, "vocab_size": 128256},
        card="a100-80",
        ranks=8,
        said=27.6 * GIB,
        where="torchtune's table: 70B, r 16, compiled, loss in chunks, 2 rows of 2048",
        micro_batch=2,
        adapter={"r": 16, "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]},
        strategy={"name": "fsdp"},
        kernels={},
    ),
    *(
        qwen("7b", QWEN_7B, length, said)
        for length, said in zip(
            (256, 512, 1024, 2048, 4096, 8192), (20.1, 20.4, 21.5, 23.8, 29.7, 36.6), strict=True
        )
    ),
    *(qwen("14b", QWEN_14B, length, said) for length, said in ((256, 34.6), (8192, 55.2))),
    *(
        Published(
            name=f"qwen-72b-{length}",
            config=QWEN_72B,
            card="a100-80",
            ranks=4,
            said=said / 4 * GB,
            where=f"{QWEN}; ZeRO-3, the sum of four cards",
            length=length,
            adapter={"r": 64, "targets": ALL},
        )
        for length, said in zip(
            (256, 512, 1024, 2048, 4096, 8192), (215, 218, 223, 229, 249, 289), strict=True
        )
    ),
    Published(
        name="phi4-offload",
        config=PHI_4,
        card="a100-80",
        ranks=4,
        where="Azure's example: all weights of Phi-4, the optimizer's state on the host",
        adapter=None,
        strategy={"name": "zero", "offload": "optimizer"},
    ),
    Published(
        name="gptj",
        config=GPT_J,
        card="a100-40",
        ranks=8,
        where="a cloud's example of GPT-J 6B, all weights, sharded",
        adapter=None,
        strategy={"name": "fsdp"},
    ),
    *(
        Published(
            name=f"v100-70b{suffix}-{size}",
            config={**LLAMA_70B, "vocab_size": 128256},
            card=f"v100-{size}",
            ranks=32,
            where="Azure's example: 70B LoRA over 32 cards of 16 or 32 GB; the sources disagree",
            length=512,
            strategy={"name": "zero"},
            model=model,
            precision={"param_dtype": "float16"},
        )
        for size in (16, 32)
        for suffix, model in (("", {}), ("-nf4", {"quantise": "nf4"}))
    ),
]

BY_NAME = {of.name: of for of in RUNS}


def planned(of: Published, folder: Path, registry: Registry) -> tuple[RunMemory, Fit]:
    """What a run holds, and how that fits its card."""
    path = folder / f"{of.name}.yaml"
    path.write_text(yaml.safe_dump(of.run_file()), encoding="utf-8")
    card = Hardware.load(registry).card(of.card)
    run = load_run_file(path, [], {"backend": card.backend, "launch.devices": of.ranks}).run
    found = plan_run(run, registry, registry.create_backend(card.backend), of.ranks)
    fits = fit(found, card, of.ranks, min(of.ranks, 8))
    assert fits is not None
    return found, fits


def main(*names: str) -> None:
    """Print a row for each run."""
    registry = Registry.load()
    print("| run | said | tensors | needs | of | fits | error |")
    print("|---|---:|---:|---:|---:|---|---:|---|")
    with TemporaryDirectory() as folder:
        for of in RUNS:
            if names and of.name not in names:
                continue
            _, fits = planned(of, Path(folder), registry)
            error = "" if of.said is None else f"{100 * (fits.needed / of.said - 1):+.0f}%"
            said = "" if of.said is None else f"{of.said / GIB:.1f}"
            sizes = (fits.tensors, fits.needed, fits.memory)
            cells = [of.name, said, *(f"{size / GIB:.1f}" for size in sizes)]
            cells += ["yes" if fits.left >= 0 else "no", error]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
