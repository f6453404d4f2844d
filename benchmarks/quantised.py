"""What quantising a base costs and saves: ``python -m benchmarks.quantised [--steps N]``.

A small Llama is trained on rows of GSM8K (``ANYGAUGE_DATA`` names the folder of
``gsm8k_train.jsonl``), all weights, byte by byte. The same LoRA is then trained on it in bfloat16
and quantised, on other rows, and losses are taken on rows that neither has seen. Bytes are counted:
those of frozen weights, with the scales of their codes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.models.quantised import quantised_layers
from anygauge.models.quiet import quiet_libraries
from anygauge.strategies.materialise import materialise

LENGTH, ROWS = 128, 16
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
BASES: dict[str, Any] = {
    "bfloat16": None,
    "nf4": {"type": "nf4"},
    "nf4, double quantisation": {"type": "nf4", "double_quantisation": True},
    "int8": {"type": "int8"},
}


def tokens(folder: Path) -> torch.Tensor:
    """(Rows, LENGTH) bytes of all questions and answers."""
    lines = (folder / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in rows).encode()
    count = len(text) // LENGTH
    return torch.frombuffer(bytearray(text[: count * LENGTH]), dtype=torch.uint8).view(-1, LENGTH)


def factory(section: ModelSection, adapter: AdapterSection | None) -> CausalModelFactory:
    """In float32 where all weights are trained, else in bfloat16."""
    return CausalModelFactory(
        section,
        adapter,
        attention="sdpa",
        dtype=torch.bfloat16 if adapter else torch.float32,
        seed=0,
        gradient_checkpointing=False,
    )


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean over tokens, ()."""
    ids = rows.long()
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    outputs = model(input_ids=ids, shift_labels=labels, use_cache=False)
    return model_loss(outputs) / (rows.shape[0] * (LENGTH - 1))


def train(model: Any, rows: torch.Tensor, steps: int, lr: float) -> None:
    """AdamW in float32 over what is trained, with a linear decay."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(masters, lr=lr)
    for step in range(steps):
        at = torch.randint(len(rows), (ROWS,), generator=torch.Generator().manual_seed(step))
        loss_of(model, rows[at]).backward()
        for parameter, master in zip(trained, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)


@torch.no_grad()
def evaluated(model: Any, rows: torch.Tensor) -> float:
    """Loss per token, in nats."""
    model.eval()
    return float(sum(loss_of(model, part) for part in rows.split(ROWS)) / (len(rows) // ROWS))


def frozen_bytes(model: torch.nn.Module) -> int:
    """Of weights that are not trained, and of buffers that belong to them."""
    held = [p for p in model.parameters() if not p.requires_grad]
    scales = [b for layer in quantised_layers(model).values() for b in layer.buffers()]
    return sum(t.numel() * t.element_size() for t in (*held, *scales))


def main(steps: int, lora_steps: int) -> None:
    """Print the table."""
    quiet_libraries()
    rows = tokens(Path(os.environ["ANYGAUGE_DATA"]))
    first, second, unseen = rows[:6000], rows[6000:12000], rows[-16 * ROWS :]
    host = torch.device("cpu")
    made = factory(ModelSection(config=CONFIG, tokenizer="none"), None)
    base: Any = made.skeleton()
    materialise(base, made, device=host, dtype=torch.float32)
    train(made.adapt(base), first, steps, 2e-3)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        base.to(torch.bfloat16).save_pretrained(folder)
        for name, quantise in BASES.items():
            of = factory(ModelSection(name=folder, quantise=quantise), AdapterSection(r=8))
            model: Any = of.skeleton()
            materialise(model, of, device=host, dtype=torch.bfloat16)
            model = of.adapt(model)
            before = evaluated(model, unseen)
            train(model, second, lora_steps, 1e-3)
            results.append((name, frozen_bytes(model), before, evaluated(model, unseen)))
    print("| base | frozen weights, MiB | loss before | loss after LoRA | gap to bfloat16 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, size, before, after in results:
        gap = "-" if name == "bfloat16" else f"{after - results[0][3]:+.4f}"
        print(f"| {name} | {size / 2**20:.2f} | {before:.4f} | {after:.4f} | {gap} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="Of the base.")
    parser.add_argument("--lora-steps", type=int, default=40)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.lora_steps)
