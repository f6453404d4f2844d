"""transformers' Trainer with peft and the ZeRO-3 file of its documentation (`auto` values)."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from benchmarks.contenders.common import (
    adapted_model,
    finish,
    join_ranks_for_trainers,
    start,
    tokenised_rows,
    trainer_arguments,
    trainer_callback,
)


def main() -> None:
    """Train one rank."""
    plan, _, _, recorder = start()
    join_ranks_for_trainers(plan)
    # Before the model: it is what makes from_pretrained shard while it loads.
    arguments = TrainingArguments(**trainer_arguments(plan))
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    model = adapted_model(plan, checkpointing=False)  # the trainer recomputes by itself
    recorder.watch(model)
    rows: Any = tokenised_rows(plan, tokenizer)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows if plan.evaluates else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[trainer_callback(recorder)],
    )
    recorder.watch_losses(trainer)
    trainer.train()
    finish(plan, trainer)


if __name__ == "__main__":
    main()
