"""A loop written by hand on torch's own engines, as a careful user would: LoRA, one process group.

Each micro-batch's loss is its own mean, as usual; gradients travel with the last micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
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

Sync = Callable[[bool], contextlib.AbstractContextManager[Any]]
"""(Whether a micro-batch is the step's last) -> what is around its forward and backward."""


def train(wrap: Callable[[ContenderPlan, Any], tuple[nn.Module, Sync]]) -> None:
    """Train one rank.

    Args:
        wrap: the adapted model -> what is called in its place, and how it sums gradients.
    """
    plan, rank, ranks, recorder = start()
    device = take_device(plan)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype(plan))
    model.config.use_cache = False
    model.to(device)
    adapted: Any = get_peft_model(model, adapter(plan), autocast_adapter_dtype=False)
    if plan.checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    recorder.watch(adapted)
    called, sync = wrap(plan, adapted)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.lr, weight_decay=0.0)
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    rows: Any = tokenised_rows(plan, tokenizer)
    batches = iter(
        DataLoader(
            rows,
            batch_size=plan.micro_batch,
            sampler=DistributedSampler(rows, ranks, rank, shuffle=True, seed=plan.seed),
            collate_fn=padding_collator(tokenizer.pad_token_id),
        )
    )
    called.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for turn in range(plan.accumulation):
            batch = on_device(next(batches), device)
            with sync(turn == plan.accumulation - 1):
                loss = called(**batch).loss
                (loss / plan.accumulation).backward()
            count = count_loss_tokens(batch["labels"])
            loss_sum += float(loss.detach()) * count
            loss_tokens += count
        nn.utils.clip_grad_norm_(trained, plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
        recorder.rank_loss(loss_sum, loss_tokens)
    dist.destroy_process_group()
