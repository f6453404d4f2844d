"""A loop written by hand on DeepSpeed, as a careful user would: ZeRO-3, LoRA, one engine.

Its settings are those that anygauge would give DeepSpeed, so that a difference in speed is one of
loops and data (see `zero3.by_hand`). Each micro-batch's loss is its own mean, as usual.
"""

from __future__ import annotations

import deepspeed
import torch
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.contenders.common import (
    adapted_model,
    batches,
    count_loss_tokens,
    on_device,
    optimizer_of,
    skip_inference_kernel,
    start,
    take_device,
)
from benchmarks.contenders.zero3 import by_hand


def main() -> None:
    """Train one rank."""
    plan, rank, ranks, recorder = start()
    device = take_device(plan)
    skip_inference_kernel()
    deepspeed.init_distributed()
    config = by_hand(plan)
    sharded_loading = HfDeepSpeedConfig(config)  # must live while the model is loaded
    torch.manual_seed(plan.seed)
    model = adapted_model(plan)
    del sharded_loading
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(plan, model), config=config
    )
    recorder.watch(engine.module)
    rows = batches(plan, rank, ranks)
    engine.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for _ in range(plan.accumulation):
            batch = on_device(next(rows), device)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            count = count_loss_tokens(batch["labels"])
            loss_sum += float(loss) * count
            loss_tokens += count
        recorder.step()
        recorder.rank_loss(loss_sum, loss_tokens)
    engine.destroy()


if __name__ == "__main__":
    main()
