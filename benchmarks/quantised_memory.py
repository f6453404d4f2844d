"""What quantising a base saves: ``python -m benchmarks.quantised_memory [--layers N]``.

A Llama of drawn weights, wide enough that weights are most of what a step needs, is written to a
temporary folder, loaded with each base, and trained by LoRA for two steps of one short row. Counted
are bytes of tensors that live at the same time: weights as they are read, and what operations
return. What an operation of bitsandbytes allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import argparse
import tempfile

import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.models.quiet import quiet_libraries
from benchmarks.kernel_timing import peak_bytes
from benchmarks.quantised import BASES, HOST, LENGTH, frozen_bytes, loaded, train

CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


def measured(section: ModelSection) -> list[int]:
    """Bytes: frozen weights, peak while the model is loaded, peak in a step."""
    with peak_bytes(HOST) as loading:
        model = loaded(section, AdapterSection(r=8))
    held = frozen_bytes(model) + sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
    rows = torch.randint(CONFIG["vocab_size"], (2, LENGTH))
    with peak_bytes(HOST) as stepping:
        train(model, rows, 2, 1e-3, many=1)
    return [frozen_bytes(model), loading[0], held + stepping[0]]


def main(layers: int) -> None:
    """Print the table."""
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": layers}
        drawn = loaded(ModelSection(config=config, tokenizer="none"), None)
        print(f"{sum(p.numel() for p in drawn.parameters()) / 1e6:.0f} million parameters")
        drawn.save_pretrained(folder)
        del drawn
        print("| base | frozen weights, MiB | peak while loading, MiB | peak in a step, MiB |")
        print("| --- | ---: | ---: | ---: |")
        for name, quantise in BASES.items():
            found = measured(ModelSection(name=folder, quantise=quantise))
            print(f"| {name} | {' | '.join(f'{size / 2**20:.0f}' for size in found)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    main(parser.parse_args().layers)
