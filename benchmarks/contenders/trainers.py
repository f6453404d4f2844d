"""Peers that are trainers: transformers' Trainer and TRL's SFTTrainer, with peft, and with the
ZeRO-3 file of transformers' documentation (`auto` values) where the plan shards.

TRL recommends packing with attention kernels that a host lacks. With peft and ZeRO-3 it forces
reentrant checkpointing.

``python -m benchmarks.contenders.trainers PLAN CONTENDER``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from benchmarks.contender_plan import ContenderPlan
from benchmarks.contenders.peer_parts import (
    Recorder,
    adapted_model,
    adapter,
    documented_zero3,
    raw_rows,
    skip_inference_kernel,
    start,
    tokenized_rows,
)


def hf_trainer(plan: ContenderPlan) -> Trainer:
    """transformers' own."""
    # Before the model: it is what makes from_pretrained shard while it loads.
    arguments = TrainingArguments(**trainer_arguments(plan))
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    return Trainer(
        model=adapted_model(plan, checkpointing=False),  # the trainer recomputes by itself
        args=arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        **given(plan, tokenized_rows(plan, tokenizer), tokenizer),
    )


def trl_trainer(plan: ContenderPlan) -> Trainer:
    """TRL's: padded, grouped by length, or packed."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **trainer_arguments(plan),
        max_length=plan.max_length,
        packing=plan.layout == "packed",
        dataset_num_proc=None,
    )
    rows = Dataset.from_list(raw_rows(plan))
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(plan.model, dtype=getattr(torch, plan.dtype)),
        args=arguments,
        peft_config=adapter(plan),
        **given(plan, rows, AutoTokenizer.from_pretrained(plan.model)),
    )


def given(plan: ContenderPlan, rows: Any, tokenizer: Any) -> dict[str, Any]:
    """What both trainers get beside model and arguments."""
    return {
        "train_dataset": rows,
        "eval_dataset": rows if plan.evaluates else None,
        "processing_class": tokenizer,
    }


def trainer_arguments(plan: ContenderPlan) -> dict[str, Any]:
    """Arguments that transformers' and TRL's trainers share."""
    return {
        "output_dir": str(Path(plan.output) / "trainer"),
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "learning_rate": plan.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": plan.max_norm,
        "gradient_checkpointing": plan.checkpointing,
        "bf16": plan.dtype == "bfloat16",
        "use_cpu": plan.device == "cpu",
        "torch_compile": plan.compiled,
        # Else it asks the device in each step whether the loss is a number.
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "per_device_eval_batch_size": plan.micro_batch,
        # As anygauge evaluates: without it, a trainer gathers the logits of all rows.
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": plan.seed,
        "train_sampling_strategy": "group_by_length" if plan.layout == "grouped" else "random",
        "accelerator_config": {"use_configured_state": True},
        **({"deepspeed": documented_zero3()} if plan.deepspeed else {}),
    }


def main(plan: ContenderPlan, recorder: Recorder) -> None:
    """Train one rank."""
    if plan.deepspeed:
        skip_inference_kernel()
    # Where there is no other device than the host, a trainer's own choice is not a process group at
    # all, and every rank would train alone; it keeps one that is there.
    PartialState(**({"backend": "gloo"} if plan.device == "cpu" else {}))
    trainer = (trl_trainer if sys.argv[2].startswith("trl") else hf_trainer)(plan)
    recorder.watch(trainer.model)
    recorder.watch_trainer(trainer)
    trainer.train()
    if plan.evaluates:
        trainer.evaluate()
        trainer.save_model(str(Path(plan.output) / "adapter"))


if __name__ == "__main__":
    main(*start())
