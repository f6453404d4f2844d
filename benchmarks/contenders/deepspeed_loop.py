"""A loop written by hand on DeepSpeed, as a careful user would: ZeRO-3, LoRA, one engine.

Its settings are those that anygauge would give DeepSpeed, so that a difference in speed is one of
loops and data (see `zero3.by_hand`). Each micro-batch's loss is its own mean, as usual.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from peft import get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.contenders.common import (
    adapter,
    count_loss_tokens,
    dtype,
    on_device,
    padding_collator,
    skip_inference_kernel,
    start,
    take_device,
    tokenised_rows,
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
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype(plan))
    del sharded_loading
    model.config.use_cache = False
    model = get_peft_model(model, adapter(plan), autocast_adapter_dtype=False)
    if plan.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.lr, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    recorder.watch(engine.module)

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
    engine.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for _ in range(plan.accumulation):
            batch = on_device(next(batches), device)
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
