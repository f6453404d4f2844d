"""TRL's SFTTrainer with peft and the same ZeRO-3 file: padded, grouped by length, or packed.

TRL recommends packing with attention kernels that a host lacks; whether packed documents are kept
apart without them is tried after training and noted. With peft and ZeRO-3 it forces reentrant
checkpointing.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.contenders.common import (
    adapter,
    dtype,
    finish,
    join_ranks_for_trainers,
    raw_rows,
    start,
    trainer_arguments,
    trainer_callback,
)


def main() -> None:
    """Train one rank."""
    plan, _, _, recorder = start()
    join_ranks_for_trainers(plan)
    packed = plan.layout == "packed"
    arguments = SFTConfig(
        **trainer_arguments(plan), max_length=plan.max_length, packing=packed, dataset_num_proc=None
    )
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype(plan))
    rows = Dataset.from_list(raw_rows(plan))
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows if plan.evaluates else None,
        processing_class=AutoTokenizer.from_pretrained(plan.model),
        peft_config=adapter(plan),
        callbacks=[trainer_callback(recorder)],
    )
    recorder.watch(trainer.model)
    recorder.watch_losses(trainer)
    trainer.train()
    finish(plan, trainer)
    if packed:
        recorder.note(documents_isolated=documents_isolated(trainer))


def documents_isolated(trainer: Any) -> bool:
    """Whether a document's logits stay the same when the one packed before it changes."""
    engine = trainer.model_wrapped
    engine.eval()
    first, second = torch.arange(2, 18), torch.arange(20, 36)

    def logits(before: torch.Tensor) -> torch.Tensor:
        rows = [{"input_ids": torch.cat((before, second)).tolist()}]
        rows[0]["labels"] = rows[0]["input_ids"]
        rows[0]["seq_lengths"] = [len(before), len(second)]
        batch = trainer.data_collator(rows)
        batch.pop("labels")
        with torch.no_grad():
            return engine(**batch, use_cache=False).logits[0, len(before) :]

    return torch.allclose(logits(first), logits(first.flip(0)), atol=1e-4)


if __name__ == "__main__":
    main()
