"""A loop on Accelerate with its DeepSpeed plugin and the same ZeRO-3 file."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks.contenders.common import (
    adapted_model,
    count_loss_tokens,
    optimizer_of,
    padding_collator,
    skip_inference_kernel,
    start,
    tokenised_rows,
)
from benchmarks.contenders.zero3 import documented


def main() -> None:
    """Train one rank."""
    plan, _, _, recorder = start()
    skip_inference_kernel()
    config = documented()
    # Accelerate fills what depends on the model; these are the loop's own.
    config["gradient_accumulation_steps"] = plan.accumulation
    config["gradient_clipping"] = plan.max_norm
    accelerator = Accelerator(
        mixed_precision="bf16" if plan.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=plan.accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True),
        # Left to choose, Accelerate takes no process group where there is no other device than
        # the host, and every rank trains alone.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    set_seed(plan.seed)
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    model: Any = adapted_model(plan)
    optimizer: Any = optimizer_of(plan, model)
    rows: Any = tokenised_rows(plan, tokenizer)
    loader = DataLoader(
        rows,
        batch_size=plan.micro_batch,
        shuffle=True,
        collate_fn=padding_collator(tokenizer.pad_token_id),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder.watch(model.module)
    model.train()
    loss_sum, loss_tokens = 0.0, 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        count = count_loss_tokens(batch["labels"])
        loss_sum += float(loss.detach()) * count
        loss_tokens += count
        if accelerator.sync_gradients:
            recorder.step()
            recorder.rank_loss(loss_sum, loss_tokens)
            loss_sum, loss_tokens = 0.0, 0
    accelerator.end_training()


if __name__ == "__main__":
    main()
