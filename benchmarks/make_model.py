"""Writes a plan's Llama with fixed random weights: ``python -m benchmarks.make_model PLAN FOLDER``.

A process of its own, so that the parent of a benchmark never imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.plan import ContenderPlan

PARAMETERS = "parameters.txt"
"""File beside the weights that has their number."""


def main(plan: ContenderPlan, folder: Path) -> None:
    """Draw the weights and save them."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = AutoConfig.for_model(**plan.llama, **tokens, dtype=plan.stored)
    torch.manual_seed(plan.seed)
    torch.set_default_dtype(getattr(torch, plan.stored))
    with torch.device(plan.device):  # a host draws for minutes
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    (folder / PARAMETERS).write_text(str(count), encoding="utf-8")


if __name__ == "__main__":
    main(ContenderPlan.load(sys.argv[1]), Path(sys.argv[2]))
