"""A loop written by hand on torch's own engines, as a careful user would: LoRA, one process group.

Each micro-batch's loss is its own mean, as usual; gradients travel with the last micro-batch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders.common import (
    adapted_model,
    batches,
    count_loss_tokens,
    on_device,
    optimizer_of,
    start,
    take_device,
    trained,
)
from benchmarks.plan import ContenderPlan

Sync = Callable[[bool], contextlib.AbstractContextManager[Any]]
"""(Whether a micro-batch is the step's last) -> what is around its forward and backward."""
Wrap = Callable[[ContenderPlan, Any], tuple[nn.Module, Sync]]
"""The adapted model -> what is called in its place, and how it sums gradients."""


def train(wrap: Wrap) -> None:
    """Train one rank."""
    plan, rank, ranks, recorder = start()
    device = take_device(plan)
    torch.manual_seed(plan.seed)
    adapted = adapted_model(plan, device)
    recorder.watch(adapted)
    called, sync = wrap(plan, adapted)
    optimizer = optimizer_of(plan, adapted)
    rows = batches(plan, rank, ranks)
    called.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for turn in range(plan.accumulation):
            batch = on_device(next(rows), device)
            with sync(turn == plan.accumulation - 1):
                loss = called(**batch).loss
                (loss / plan.accumulation).backward()
            count = count_loss_tokens(batch["labels"])
            loss_sum += float(loss.detach()) * count
            loss_tokens += count
        nn.utils.clip_grad_norm_(trained(adapted), plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
        recorder.rank_loss(loss_sum, loss_tokens)


def train_together(wrap: Wrap) -> None:
    """Train one rank of a process group."""
    device = take_device(ContenderPlan.load(sys.argv[1]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(wrap)
    dist.destroy_process_group()
