"""Writes a small Llama with fixed random weights: ``python -m benchmarks.make_model --help``.

A process of its own, so that the parent of a benchmark never imports torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PARAMETERS = "parameters.txt"
"""File beside the weights that has their number."""


def main() -> None:
    """Command line: draw the weights and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    for name in ("vocabulary", "layers", "hidden", "intermediate", "heads", "positions", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, default=0, help="0: as many as heads")
    parser.add_argument("--device", default="cpu", help="draws the weights; a host takes minutes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads or given.heads,
        max_position_embeddings=given.positions,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
        dtype=given.dtype,
    )
    torch.manual_seed(given.seed)
    torch.set_default_dtype(getattr(torch, given.dtype))
    with torch.device(given.device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(given.folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    (Path(given.folder) / PARAMETERS).write_text(str(count), encoding="utf-8")


if __name__ == "__main__":
    main()
