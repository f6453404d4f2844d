"""What all contenders share: the plan, the rows, the adapter, the trainers' arguments, the record.

Nothing here trains; each contender's loop is in its own file and imports nothing of anygauge.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.contenders.zero3 import documented
from benchmarks.plan import ContenderPlan

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
        self._late_losses: list[Tensor] = []
        self._late: list[tuple[float, list[Tensor | int], int]] = []
        atexit.register(self._write_late)

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

    def watch_losses(self, trainer: Any) -> None:
        """Keep what each micro-batch of a trainer returns, parts of a step's mean loss. The trainer
        itself logs as seldom as its users have it: to log is to wait for the device."""
        usual = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = usual(*args, **kwargs)
            self._losses.append(loss.detach())
            return loss

        trainer.training_step = training_step

    def step(self) -> None:
        """An optimizer step has ended now."""
        if self._losses:
            loss, self._losses = torch.stack(self._losses).float().sum(), []
            if loss.device.type == "cpu":
                self.loss(float(loss))
            else:
                self._late_losses.append(loss)
        step = (time.time(), self._tokens, self._slots)
        if any(isinstance(each, Tensor) and each.device.type != "cpu" for each in self._tokens):
            self._late.append(step)
        else:
            self._write_step(*step)
        self._tokens, self._slots = [], 0

    def rank_loss(self, loss_sum: float, loss_tokens: int) -> None:
        """Loss of the last step on this rank: the sum over loss tokens, and their number."""
        self._write({"loss_sum": loss_sum, "loss_tokens": loss_tokens})

    def loss(self, value: float) -> None:
        """Mean loss of the last step on this rank."""
        self._write({"loss": value})

    def _write_late(self) -> None:
        for step in self._late:
            self._write_step(*step)
        for loss in self._late_losses:
            self.loss(float(loss))

    def _write_step(self, moment: float, tokens: Sequence[Tensor | int], slots: int) -> None:
        self._write({"time": moment, "tokens": sum(map(int, tokens)), "slots": slots})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def start() -> tuple[ContenderPlan, int, int, Recorder]:
    """(plan, rank, number of ranks, recorder) of this process."""
    plan = ContenderPlan.load(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return plan, rank, ranks, Recorder(plan, rank)


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


def dtype(plan: ContenderPlan) -> torch.dtype:
    """The type of weights and arithmetic."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[plan.dtype]


def adapted_model(
    plan: ContenderPlan, device: torch.device | None = None, *, checkpointing: bool = True
) -> Any:
    """The model with its adapter; without a device, where its loading has put it."""
    model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype(plan))
    model.config.use_cache = False
    if device is not None:
        model.to(device)
    adapted: Any = get_peft_model(model, adapter(plan), autocast_adapter_dtype=False)
    if plan.checkpointing and checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    return adapted


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The adapter's parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(plan: ContenderPlan, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the adapter."""
    return torch.optim.AdamW(trained(model), lr=plan.lr, weight_decay=0.0)


def batches(plan: ContenderPlan, rank: int, ranks: int) -> Iterator[dict[str, Tensor]]:
    """Padded micro-batches of a rank, in random order."""
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    rows: Any = tokenised_rows(plan, tokenizer)
    loader = DataLoader(
        rows,
        batch_size=plan.micro_batch,
        sampler=DistributedSampler(rows, ranks, rank, shuffle=True, seed=plan.seed),
        collate_fn=padding_collator(tokenizer.pad_token_id),
    )
    return iter(loader)


def raw_rows(plan: ContenderPlan) -> list[dict[str, str]]:
    """The rows as they stand in the file."""
    with Path(plan.rows).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def tokenised_rows(plan: ContenderPlan, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Rows as `input_ids` and `labels`: the end token has a loss, a prompt has none."""
    rows = []
    for row in raw_rows(plan):
        prompt = tokenizer(row.get("prompt", ""))["input_ids"]
        answer = tokenizer(row["completion"] if plan.has_prompts else row["text"])["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        rows.append(
            {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer},
        )
    return rows


def padding_collator(pad_id: int) -> Callable[[Sequence[dict[str, list[int]]]], dict[str, Tensor]]:
    """Rows to (B, T) int64 tensors, padded on the right to the longest of them."""

    def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        width = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, value: int) -> Tensor:
            return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

        return {
            "input_ids": padded("input_ids", pad_id),
            "labels": padded("labels", IGNORED),
            "attention_mask": torch.tensor(
                [
                    [1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"]))
                    for row in rows
                ]
            ),
        }

    return collate


def count_loss_tokens(labels: Tensor) -> int:
    """Labels that count: the model shifts them by one."""
    return int((labels[:, 1:] != IGNORED).sum())


def take_device(plan: ContenderPlan) -> torch.device:
    """This rank's device, which is then the current one."""
    if plan.device == "cpu":
        return torch.device("cpu")
    device = torch.device(plan.device, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(plan.device).set_device(device)
    return device


def on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on its way to the device."""
    return {name: each.to(device, non_blocking=True) for name, each in batch.items()}


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
        **({"deepspeed": documented()} if plan.deepspeed else {}),
    }


def join_ranks_for_trainers(plan: ContenderPlan) -> None:
    """Join the process group before a trainer does.

    Where there is no other device than the host, a trainer's own choice is not a process group at
    all, and every rank would train alone; it keeps one that is there.
    """
    from accelerate import PartialState

    if plan.deepspeed:
        skip_inference_kernel()
    PartialState(**({"backend": "gloo"} if plan.device == "cpu" else {}))


def finish(plan: ContenderPlan, trainer: Any) -> None:
    """What comes after training, where the plan asks for it."""
    if plan.evaluates:
        trainer.evaluate()
        trainer.save_model(str(Path(plan.output) / "adapter"))


def trainer_callback(recorder: Recorder) -> Any:
    """A callback of transformers' trainers that records steps."""
    from transformers import TrainerCallback

    class Recording(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.step()

    return Recording()
