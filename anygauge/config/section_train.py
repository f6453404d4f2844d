"""The sections `train` and `checkpoint` of a run file."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, model_validator

from anygauge.config.section import (
    LARGEST_NUMBER,
    BatchSize,
    Fraction,
    NonNegative,
    NonNegativeNumber,
    Positive,
    PositiveNumber,
    Seconds,
    Section,
)
from anygauge.interface import Activations

_Ratio = Annotated[float, Field(ge=1, le=LARGEST_NUMBER, allow_inf_nan=False)]
_SEEDS = 2**63 - 1


class OptimizerSection(Section):
    """What turns gradients into updates. Norms and biases are never decayed."""

    name: Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd"] = Field(
        "adamw", description="Optimizer."
    )
    lr: PositiveNumber = Field(2e-4, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] | None = Field(
        None,
        description="Decay of the moments; null: 0.9, 0.999 (adamw, adamw_8bit), 0.9, 0.99 (lion).",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="sgd; null: 0.9."
    )
    eps: PositiveNumber | None = Field(
        None, description="Added to the denominator; null: 1e-8 (adamw, adamw_8bit)."
    )
    weight_decay: NonNegativeNumber = Field(
        0.0, description="Decoupled decay of matrices, embeddings too."
    )
    loraplus_lr_ratio: _Ratio | None = Field(
        None, description="Rate of the adapter's B factors as a multiple of lr (LoRA+); null: 1."
    )
    paged: bool = Field(
        False,
        description="adamw_8bit: its moments lie in memory that moves to the host when the device "
        "has no room.",
    )

    @model_validator(mode="after")
    def _of_this_optimizer(self) -> OptimizerSection:
        takes = {"betas": ("adamw", "adamw_8bit", "lion"), "eps": ("adamw", "adamw_8bit")}
        takes["momentum"] = ("sgd",)
        for field, names in takes.items():
            if getattr(self, field) is not None and self.name not in names:
                raise ValueError(f"{field!r} is not a setting of {self.name}; remove it")
        if self.paged and self.name != "adamw_8bit":
            raise ValueError(f"'paged' is a setting of adamw_8bit alone, not of {self.name}")
        return self


class ScheduleSection(Section):
    """Learning rate over the run: linear warmup, then one of three shapes."""

    name: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape.")
    warmup_steps: NonNegative = Field(0, description="Steps from 0 to the peak.")
    warmup_ratio: Fraction = Field(0.0, description="The same as a share of all steps.")
    final_ratio: Fraction = Field(0.0, description="Last rate as a share of the peak.")

    @model_validator(mode="after")
    def _one_warmup(self) -> ScheduleSection:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give 'warmup_steps' or 'warmup_ratio', not both")
        return self


class CheckpointingSection(Section):
    """Which decoder layers recompute their activations in backward, and what of them."""

    every: Positive = Field(
        1, description="One of so many layers recomputes, beginning with the first; 1: each."
    )
    selective: bool = Field(
        False,
        description="Keep the results of matrix products and attention; recompute the rest.",
    )


def recomputation(given: bool | CheckpointingSection) -> Activations:
    """What ``train.gradient_checkpointing`` says of decoder layers."""
    if isinstance(given, bool):
        return Activations(every=int(given))
    return Activations(every=given.every, selective=given.selective)


class TrainSection(Section):
    """The loop."""

    steps: Positive | None = Field(None, description="Optimizer steps; wins over epochs.")
    epochs: PositiveNumber = Field(1.0, description="Passes over the rows.")
    global_batch_size: BatchSize = Field(
        16, description="Sequences per optimizer step across all ranks; decides the result."
    )
    micro_batch_size: BatchSize = Field(
        4,
        description="Most sequences per forward on one rank; decides memory. The rest accumulates.",
    )
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    max_grad_norm: NonNegativeNumber = Field(
        1.0, description="Largest gradient norm; 0 for no clipping."
    )
    gradient_checkpointing: bool | CheckpointingSection = Field(
        True,
        description="Recompute activations in backward to save memory: all layers, none, or as "
        "the section says.",
    )
    activation_offloading: bool = Field(
        False,
        description="What layers keep for backward lies in the host's memory meanwhile; weights "
        "stay where they are.",
    )
    router_aux_loss_coef: NonNegativeNumber = Field(
        0.0,
        description="Weight of the loss that keeps a mixture of experts in balance; 0: none.",
    )
    seed: Annotated[int, Field(ge=0, le=_SEEDS)] = Field(
        0, description="Order, initial weights and dropout."
    )
    eval_every: NonNegative = Field(0, description="Steps between evaluations; 0: at the end.")
    eval_at_start: bool = Field(
        False, description="Evaluate before the first step too: with an adapter, the base model."
    )
    log_every: Positive = Field(1, description="Steps between lines of metrics.")
    system_every_s: NonNegativeNumber = Field(
        10.0, description="Seconds between samples of host, process and device; 0: none."
    )

    trainable: list[str] = Field(
        default_factory=list,
        description="Without an adapter: expressions over whole names of parameters; only what one "
        "of them matches is trained. Empty: all weights.",
    )
    frozen: list[str] = Field(
        default_factory=list,
        description="Without an adapter: expressions likewise; what one matches is not trained.",
    )

    @model_validator(mode="after")
    def _can_be_offloaded(self) -> TrainSection:
        if self.activation_offloading and self.activations.selective:
            raise ValueError(
                "'activation_offloading' does not reach what 'gradient_checkpointing' keeps with "
                "selective: true, since torch holds it elsewhere; remove one of them"
            )
        return self

    @property
    def activations(self) -> Activations:
        """What decoder layers keep for backward, and where."""
        found = recomputation(self.gradient_checkpointing)
        return dataclasses.replace(found, offload=self.activation_offloading)

    def sequences_at_once(self, parts: int) -> int:
        """Sequences per forward on one rank: `micro_batch_size`, or its part if that is less.

        So a recipe stays one recipe on more devices, until they are more than its sequences.
        """
        share, rest = divmod(self.global_batch_size, parts)
        return share if not rest and 0 < share < self.micro_batch_size else self.micro_batch_size


class CheckpointSection(Section):
    """Points that a run can be resumed from."""

    every: NonNegative = Field(
        0, description="Steps between checkpoints; 0: only when the run is asked to end."
    )
    keep_last: Positive = Field(2, description="How many of the newest checkpoints are kept.")
    keep_best: NonNegative = Field(
        0, description="Also kept: this many with the lowest evaluation loss."
    )
    grace_s: Seconds = Field(
        60.0,
        description="Seconds to end the step under way and write a checkpoint when asked to end.",
    )
    resume: str = Field(
        "never",
        description="never; auto: from the newest sound checkpoint of this run, if there is one; "
        "or the folder of a checkpoint.",
    )
