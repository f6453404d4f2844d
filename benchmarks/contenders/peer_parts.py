"""What peers share: the plan, the rows, the adapted model, the record. Nothing of anygauge."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.contender_plan import ContenderPlan

IGNORED = -100


class Recorder:
    """Writes what one rank did: a line of JSON per step, at once, so that a failure keeps it.

    Where tokens are counted on a device, steps are written at the end: nobody waits for a count.
    """

    def __init__(self, plan: ContenderPlan, rank: int) -> None:
        self._file = (Path(plan.output) / f"steps-rank{rank}.jsonl").open("w", encoding="utf-8")
        self._tokens: list[Tensor | int] = []
        self._slots = 0
        self._losses: list[Tensor] = []
        self._steps: list[tuple[float, list[Tensor | int], int, Tensor | float, int]] = []
        atexit.register(self._write)

    def watch(self, model: nn.Module) -> None:
        """Count real tokens and places for tokens in every forward of the outermost model."""

        def count(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
            if not module.training:
                return
            mask = inputs.get("attention_mask")
            # Without a mask nothing is padded.
            slots = inputs["input_ids"].numel()
            self._tokens.append(mask.sum() if mask is not None else slots)
            self._slots += slots

        model.register_forward_pre_hook(count, with_kwargs=True)

    def watch_trainer(self, trainer: Any) -> None:
        """Keep what each micro-batch of a trainer returns, parts of a step's mean loss, and when
        steps end. The trainer itself logs as seldom as its users have it: to log is to wait for the
        device."""
        usual, ends = trainer.training_step, trainer.callback_handler.on_step_end

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = usual(*args, **kwargs)
            self._losses.append(loss.detach())
            return loss

        def on_step_end(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return ends(*args, **kwargs)

        trainer.training_step = training_step
        trainer.callback_handler.on_step_end = on_step_end

    def step(self, loss_sum: float | None = None, loss_tokens: int = 1) -> None:
        """An optimizer step has ended now.

        Args:
            loss_sum: on this rank, over its `loss_tokens`; else the mean is that of
                `watch_trainer`.
        """
        loss = torch.stack(self._losses).float().sum() if loss_sum is None else loss_sum
        self._steps.append((time.time(), self._tokens, self._slots, loss, loss_tokens))
        on_device = any(isinstance(t, Tensor) and t.device.type != "cpu" for t in self._tokens)
        self._tokens, self._slots, self._losses = [], 0, []
        if not on_device:
            self._write()

    def _write(self) -> None:
        for moment, tokens, slots, loss, loss_tokens in self._steps:
            step = {"time": moment, "tokens": sum(map(int, tokens)), "slots": slots}
            step |= {"loss_sum": float(loss), "loss_tokens": loss_tokens}
            self._file.write(json.dumps(step) + "\n")
        self._file.flush()
        self._steps = []


def start() -> tuple[ContenderPlan, Recorder]:
    """Plan and recorder of this process."""
    plan = ContenderPlan.load(sys.argv[1])
    return plan, Recorder(plan, int(os.environ["RANK"]))


def skip_inference_kernel() -> None:
    """Keep DeepSpeed from compiling an operator that only inference uses."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def adapter(plan: ContenderPlan) -> LoraConfig:
    """LoRA on every linear layer."""
    return LoraConfig(
        r=plan.lora_rank,
        lora_alpha=plan.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )


def adapted_model(
    plan: ContenderPlan, device: torch.device | None = None, *, checkpointing: bool = True
) -> Any:
    """The model with its adapter; without a device, where its loading has put it."""
    model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=getattr(torch, plan.dtype))
    model.config.use_cache = False
    if device is not None:
        model.to(device)
    adapted: Any = get_peft_model(model, adapter(plan), autocast_adapter_dtype=False)
    if plan.checkpointing and checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    return adapted


def raw_rows(plan: ContenderPlan) -> list[dict[str, str]]:
    """The rows as they stand in the file."""
    with Path(plan.rows).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def tokenized_rows(plan: ContenderPlan, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Rows as `input_ids` and `labels`: the end token has a loss, a prompt has none."""
    rows = []
    for row in raw_rows(plan):
        prompt = tokenizer(row.get("prompt", ""))["input_ids"]
        answer = tokenizer(row["completion"] if plan.has_prompts else row["text"])["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
    return rows


def documented_zero3() -> dict[str, Any]:
    """The ZeRO-3 file of transformers' documentation, with `auto` values.

    Without its optimizer section, which asks for an operator that DeepSpeed compiles: torch's
    AdamW, the Trainer's own default, is taken in its place.
    """
    return {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
