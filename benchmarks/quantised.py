"""What quantising a base costs in loss: ``python -m benchmarks.quantised --base FOLDER``.

A small Llama is trained on general text (Wikipedia and Alpaca, in the folder that ``ANYGAUGE_DATA``
names) and kept in FOLDER for the next time. The same LoRA is then trained on it in bfloat16 and
quantised, on GSM8K, several times with different seeds: first factors, and order of rows. A seed is
the same for all bases, so losses are compared in pairs. Rows whose loss is taken were not trained
on. Memory is another benchmark: ``benchmarks.quantised_memory``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.models.quantised import quantised_layers
from anygauge.models.quiet import quiet_libraries
from anygauge.strategies.materialise import materialise
from benchmarks.texts import Text, texts

LENGTH, ROWS, UNSEEN = 128, 8, 256
"""Tokens of a row, rows of a step, rows of which a loss is taken."""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
BASES: dict[str, Any] = {
    "bfloat16": None,
    "nf4": {"type": "nf4"},
    "nf4, double quantisation": {"type": "nf4", "double_quantisation": True},
    "int8": {"type": "int8"},
}
HOST = torch.device("cpu")


def halves(found: list[Text]) -> tuple[list[str], list[str]]:
    """Texts to train on, and every tenth, which is not."""
    whole = [text.prompt + text.completion for text in found]
    return [text for i, text in enumerate(whole) if i % 10], whole[::10]


def tokens(tokenizer: Tokenizer, found: list[str]) -> Tensor:
    """(Rows, LENGTH) int64."""
    ids = [i for one in tokenizer.encode_batch([text + "\n\n" for text in found]) for i in one.ids]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def factory(
    section: ModelSection, adapter: AdapterSection | None, seed: int = 0
) -> CausalModelFactory:
    """In bfloat16."""
    return CausalModelFactory(
        section,
        adapter,
        attention="sdpa",
        dtype=torch.bfloat16,
        seed=seed,
        gradient_checkpointing=False,
    )


def loaded(section: ModelSection, adapter: AdapterSection | None, seed: int = 0) -> Any:
    """A model on the host, with its adapter."""
    made = factory(section, adapter, seed)
    model: Any = made.skeleton()
    materialise(model, made, device=HOST, dtype=torch.bfloat16)
    return made.adapt(model)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Sum over tokens, (), by the kernel that a run would have."""
    labels = pad(ids[:, 1:], (0, 1), value=-100)
    return model_loss(model(input_ids=ids, shift_labels=labels, use_cache=False))


def train(model: Any, rows: Tensor, steps: int, lr: float, seed: int = 0, many: int = ROWS) -> None:
    """AdamW in float32 over what is trained; the rate rises for 20 steps and falls to zero.

    Args:
        many: rows of a step.
    """
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(masters, lr=lr)
    drawn = torch.Generator().manual_seed(seed)
    for step in range(steps):
        at = torch.randint(len(rows), (many,), generator=drawn)
        (loss_of(model, rows[at]) / (many * (LENGTH - 1))).backward()
        for parameter, master in zip(trained, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 20, 1 - step / steps)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)


@torch.no_grad()
def evaluated(model: Any, rows: Tensor) -> Tensor:
    """Loss per token of each row, (rows,), in nats."""
    model.eval()
    found = []
    for ids in rows.split(ROWS):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        found.append(cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1))
    return torch.cat(found)


def frozen_bytes(model: torch.nn.Module) -> int:
    """Of weights that are not trained, and of buffers that belong to them."""
    held = [p for p in model.parameters() if not p.requires_grad]
    scales = [b for layer in quantised_layers(model).values() for b in layer.buffers()]
    return sum(t.numel() * t.element_size() for t in (*held, *scales))


def base(folder: Path, general: list[str], steps: int) -> Tokenizer:
    """The tokenizer of a base in a folder; both are trained where they are not there yet."""
    words = folder / "tokenizer.json"
    if not words.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        made: Any = ByteLevelBPETokenizer()
        made.train_from_iterator(general, vocab_size=CONFIG["vocab_size"], show_progress=False)
        model = loaded(ModelSection(config=CONFIG, tokenizer="none"), None)
        train(model, tokens(made, general), steps, 1e-3)
        model.save_pretrained(folder)
        made.save(str(words))
    return Tokenizer.from_file(str(words))


def spread(gaps: list[float]) -> str:
    """Mean, with the standard error of it."""
    error = stdev(gaps) / len(gaps) ** 0.5
    return f"{fmean(gaps):+.4f} ± {error:.4f}"


def main(folder: Path, steps: int, lora_steps: int, seeds: int) -> None:
    """Print the loss of the base, and the table."""
    quiet_libraries()
    data = Path(os.environ["ANYGAUGE_DATA"])
    general, general_unseen = halves(texts("full", data, 0) + texts("alpaca", data, 0))
    domain, domain_unseen = halves(texts("gsm8k", data, 0))
    tokenizer = base(folder, general, steps)
    rows, unseen = tokens(tokenizer, domain), tokens(tokenizer, domain_unseen)[:UNSEEN]
    plain = loaded(ModelSection(name=str(folder)), None)
    known = evaluated(plain, tokens(tokenizer, general_unseen)[:UNSEEN]).mean()
    size = sum(p.numel() for p in plain.parameters())
    print(
        f"base: {size / 1e6:.1f} million parameters, loss on general text {known:.4f}", flush=True
    )

    held: dict[str, int] = {}
    before: dict[str, Tensor] = {}
    after: dict[str, list[float]] = {name: [] for name in BASES}
    for seed in range(seeds):
        for name, quantise in BASES.items():
            section = ModelSection(name=str(folder), quantise=quantise)
            model = loaded(section, AdapterSection(r=8), seed)
            if name not in before:
                held[name], before[name] = frozen_bytes(model), evaluated(model, unseen)
            train(model, rows, lora_steps, 2e-3, seed)
            after[name].append(float(evaluated(model, unseen).mean()))
            print(f"seed {seed}, {name}: {after[name][-1]:.4f}", flush=True)
    print("| base | frozen, MiB | loss before | gap | loss after LoRA | gap | least to most |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in BASES:
        cells = [name, f"{held[name] / 2**20:.2f}"]
        gaps = [a - b for a, b in zip(after[name], after["bfloat16"], strict=True)]
        first = (before[name] - before["bfloat16"]).tolist()
        none = name == "bfloat16"
        cells += [f"{before[name].mean():.4f}", "-" if none else spread(first)]
        cells += [f"{fmean(after[name]):.4f}", "-" if none else spread(gaps)]
        cells += ["-" if none else f"{min(gaps):+.4f} to {max(gaps):+.4f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="Trained there if it is not.")
    parser.add_argument("--steps", type=int, default=900, help="Of the base.")
    parser.add_argument("--lora-steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3, help="At least 2.")
    arguments = parser.parse_args()
    main(arguments.base, arguments.steps, arguments.lora_steps, arguments.seeds)
