"""The upper bound: each process trains the whole model alone on its share, with no communication.

Not a contender that anybody could use for one model: the processes end with different weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.contenders.common import (
    adapter,
    count_loss_tokens,
    dtype,
    on_device,
    padding_collator,
    start,
    take_device,
    tokenised_rows,
)
from benchmarks.plan import ContenderPlan


def train(watch: Callable[[ContenderPlan, Any], object] = lambda plan, model: None) -> None:
    """Train one process by itself.

    Args:
        watch: given the plan and the adapted model before its first step.
    """
    plan, rank, ranks, recorder = start()
    device = take_device(plan)
    torch.manual_seed(plan.seed)
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype(plan))
    model.config.use_cache = False
    model.to(device)
    model = get_peft_model(model, adapter(plan), autocast_adapter_dtype=False)
    if plan.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder.watch(model)
    watch(plan, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.lr, weight_decay=0.0)
    rows: Any = tokenised_rows(plan, tokenizer)[rank::ranks]
    batches = iter(
        DataLoader(
            rows,
            batch_size=plan.micro_batch,
            shuffle=True,
            collate_fn=padding_collator(tokenizer.pad_token_id),
        )
    )
    model.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for _ in range(plan.accumulation):
            batch = on_device(next(batches), device)
            loss = model(**batch).loss
            (loss / plan.accumulation).backward()
            count = count_loss_tokens(batch["labels"])
            loss_sum += float(loss.detach()) * count
            loss_tokens += count
        torch.nn.utils.clip_grad_norm_(trained, plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
        recorder.rank_loss(loss_sum, loss_tokens)


if __name__ == "__main__":
    train()
