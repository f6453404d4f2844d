"""TRL's SFTTrainer with peft and the same ZeRO-3 file: padded, grouped by length, or packed.

TRL recommends packing with attention kernels that a host lacks. With peft and ZeRO-3 it forces
reentrant checkpointing.
"""

from __future__ import annotations

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
    arguments = SFTConfig(
        **trainer_arguments(plan),
        max_length=plan.max_length,
        packing=plan.layout == "packed",
        dataset_num_proc=None,
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


if __name__ == "__main__":
    main()
