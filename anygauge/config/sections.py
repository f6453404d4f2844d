"""The sections `model`, `adapter`, `train` and `checkpoint` of a run file, and what all share."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, model_validator

from anygauge.config.plugin_sections import PluginSection
from anygauge.interface import Activations
from anygauge.util.section import (
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


class QuantizeSection(Section):
    """How the base's linear layers are quantized. They stay frozen; an adapter is trained."""

    type: Literal["nf4", "int8"] = Field(
        description="Quantization by bitsandbytes: 4 bits (nf4) or 8 bits (int8)."
    )
    double_quantization: bool = Field(
        False, description="nf4 alone: scales of blocks are quantized as well."
    )
    compute_dtype: Literal["param_dtype", "float32", "bfloat16", "float16"] = Field(
        "param_dtype",
        description="nf4 only: type in which layers multiply with their dequantized weights.",
    )

    @model_validator(mode="after")
    def _fits_type(self) -> QuantizeSection:
        given = self.double_quantization or self.compute_dtype != "param_dtype"
        if self.type == "int8" and given:
            raise ValueError("'double_quantization' and 'compute_dtype' are for type nf4 alone")
        return self


class ModelSection(Section):
    """Which model to train. Give `name`, or `config` for random weights."""

    name: str | None = Field(None, description="A local folder, or a name on the model hub.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    config: dict[str, Any] | None = Field(
        None, description="Architecture for random weights: model_type and its sizes."
    )
    tokenizer: str | None = Field(
        None, description="Folder, hub name or tokenizer.json; left out: the model's own."
    )
    attention: str = Field("auto", description="Attention implementation; auto: the backend's.")
    trust_remote_code: bool = Field(False, description="Run model code that the hub ships.")
    new_tokens: str | list[str] = Field(
        default_factory=list,
        description="Tokens to add to the vocabulary: a list, or a file with one a line.",
    )
    new_special_tokens: str | list[str] = Field(
        default_factory=list,
        description="Special tokens to add, such as turn markers; generated answers omit them.",
    )
    new_tokens_init: Literal["mean", "normal"] = Field(
        "mean",
        description="Initial embedding rows of new tokens: the mean of the existing rows, or drawn "
        "with their mean and covariance.",
    )
    eos_token: str | None = Field(
        None,
        description="Token that ends a row and an answer, one of the vocabulary or of "
        "new_special_tokens; null: the tokenizer's own.",
    )
    quantize: Literal["nf4", "int8"] | QuantizeSection | None = Field(
        None, description="Quantize linear layers while they are read: a type, or a section."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.name is None) == (self.config is None):
            raise ValueError("give exactly one of 'name' (existing weights) and 'config' (random)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs a 'model_type', such as llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a model made from 'config' needs a 'tokenizer' as well")
        return self


def _check_regex(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else in a later Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is not a regular expression ({error})") from None
    return text


def _check_targets(value: str | list[str]) -> str | list[str]:
    try:
        return _check_regex(value) if isinstance(value, str) and value != "all-linear" else value
    except ValueError as error:
        raise ValueError(
            f"{error}; valid: all-linear, a list of the last parts of layer names, or one regular "
            "expression over whole names"
        ) from None


_Expression = Annotated[str, AfterValidator(_check_regex)]
_Targets = Annotated[str | list[str], AfterValidator(_check_targets)]


class AdapterGroup(Section):
    """Layers of an adapter that have a rank or scale of their own."""

    targets: _Targets = Field(
        description="As in adapter.targets; may name layers that adapter.targets does not."
    )
    r: Positive | None = Field(None, description="Left out: adapter.r.")
    alpha: PositiveNumber | None = Field(None, description="Left out: adapter.alpha.")


_DECIDED_BY_START = frozenset(
    {"r", "alpha", "rslora", "dora", "targets", "groups", "target_parameters", "init"}
    | {"modules_to_save"}
)


class AdapterSection(Section):
    """A low-rank adapter (LoRA). Leave the section out to train all weights."""

    type: Literal["lora"] = Field("lora", description="Kind of adapter.")
    r: Positive = Field(16, description="Inner dimension (rank) of the two factors.")
    alpha: PositiveNumber = Field(32, description="The update is scaled by alpha / r.")
    rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead (rsLoRA).")
    dora: bool = Field(
        False, description="Train direction and magnitude of each weight separately (DoRA)."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Dropout on the adapter's input."
    )
    targets: _Targets = Field(
        "all-linear",
        description="all-linear (all linear layers but the output layer); a list of the last "
        "parts of layer names, which may include all-linear, embeddings and the output layer; or "
        "one regular expression that matches whole names.",
    )
    groups: list[AdapterGroup] = Field(
        default_factory=list,
        description="Further layers, or some of `targets`, with a rank and scale of their own.",
    )
    target_parameters: list[str] = Field(
        default_factory=list,
        description="Other parameters than a layer's weight, by the last parts of their names, "
        "such as experts.gate_up_proj.",
    )
    start_from: str | None = Field(
        None,
        description="Folder of an adapter to continue from. It decides rank, scale and layers: "
        "leave the fields above out or repeat its values (dropout is free). Leave init out.",
    )
    verify: bool = Field(
        True,
        description="Load the saved adapter onto a fresh base on the host, and compare logits.",
    )
    init: bool | str = Field(
        True,
        description="How factors begin, as peft's init_lora_weights has it: true, false, gaussian, "
        "orthogonal, pissa or olora.",
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Modules that are trained and saved whole, by the ends of their names, such as "
        "mlp.gate for routers, or embed_tokens.",
    )

    @property
    def own_fields(self) -> frozenset[str]:
        """The fields that `start_from` decides and the run file gives."""
        return _DECIDED_BY_START & self.model_fields_set

    @property
    def left_out(self) -> frozenset[str]:
        """The fields that `start_from` decides and the run file does not give."""
        return _DECIDED_BY_START - self.model_fields_set


_Share = Annotated[float, Field(gt=0, le=1)]
_Ratio = Annotated[float, Field(ge=1, le=LARGEST_NUMBER, allow_inf_nan=False)]
_SEEDS = 2**63 - 1


class OptimizerSection(PluginSection):
    """What turns gradients into updates. Norms and biases are never decayed."""

    plugin_kind: ClassVar = "optimizer"
    plugin_kinds: ClassVar = "optimizers"
    default_plugin: ClassVar = "adamw"

    name: str = Field(description="Optimizer.")
    lr: PositiveNumber = Field(2e-4, description="Peak learning rate.")
    weight_decay: NonNegativeNumber = Field(
        0.0, description="Decoupled decay of matrices, embeddings too."
    )
    loraplus_lr_ratio: _Ratio | None = Field(
        None, description="Rate of the adapter's B factors as a multiple of lr (LoRA+); null: 1."
    )


class ScheduleSection(Section):
    """Learning rate over the run: linear warmup, then one of four shapes."""

    name: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "cosine",
        description="Shape; warmup_stable_decay (WSD) is constant, then falls at the end.",
    )
    warmup_steps: NonNegative = Field(0, description="Steps from 0 to the peak.")
    warmup_ratio: Fraction = Field(0.0, description="The same as a share of all steps.")
    final_ratio: Fraction = Field(0.0, description="Last rate as a share of the peak.")
    num_decay_steps: Positive | None = Field(
        None, description="warmup_stable_decay: steps of the decay; null: see decay_ratio."
    )
    decay_ratio: _Share | None = Field(
        None, description="The same as a share of all steps; null: 0.1."
    )
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        None, description="warmup_stable_decay: shape of the decay; null: cosine."
    )

    @model_validator(mode="after")
    def _each_once(self) -> ScheduleSection:
        for steps, ratio in (("warmup_steps", "warmup_ratio"), ("num_decay_steps", "decay_ratio")):
            if getattr(self, steps) and getattr(self, ratio):
                raise ValueError(f"give '{steps}' or '{ratio}', not both")
        decay = [n for n in ("num_decay_steps", "decay_ratio", "decay_type") if getattr(self, n)]
        if decay and self.name != "warmup_stable_decay":
            raise ValueError(
                f"'{decay[0]}' is a setting of warmup_stable_decay, not of {self.name}; remove it"
            )
        return self


class CheckpointingSection(Section):
    """Which decoder layers recompute activations in backward, and which activations."""

    every: Positive = Field(
        1, description="N: every Nth layer recomputes, beginning with the first; 1: all layers."
    )
    selective: bool = Field(
        False,
        description="Keep the results of matrix products and attention; recompute the rest.",
    )


def recomputation(given: bool | CheckpointingSection) -> Activations:
    """Read ``train.gradient_checkpointing`` for decoder layers."""
    if isinstance(given, bool):
        return Activations(every=int(given))
    return Activations(every=given.every, selective=given.selective)


class EarlyStoppingSection(Section):
    """Ends the run when the evaluation loss no longer falls. Needs `eval_every`."""

    patience: Positive = Field(
        description="Evaluations in a row without a lower loss after which the run ends."
    )
    min_delta: NonNegativeNumber = Field(
        0.0, description="A loss is lower only if it is below the lowest one by more than this."
    )


class TrainSection(Section):
    """The loop."""

    steps: Positive | None = Field(None, description="Optimizer steps; wins over epochs.")
    epochs: PositiveNumber = Field(1.0, description="Passes over the rows.")
    global_batch_size: BatchSize = Field(
        16, description="Sequences per optimizer step across all ranks; decides the result."
    )
    micro_batch_size: BatchSize = Field(
        4,
        description="Largest number of sequences per forward on one rank; determines memory. "
        "Gradients accumulate over the forwards of a step.",
    )
    optimizer: SerializeAsAny[OptimizerSection] = Field(default_factory=OptimizerSection.of_default)
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
        description="Keep what layers save for backward in the host's memory until backward needs "
        "it.",
    )
    router_aux_loss_coef: NonNegativeNumber = Field(
        0.0,
        description="Weight of the loss that keeps a mixture of experts in balance; 0: none.",
    )
    seed: Annotated[int, Field(ge=0, le=_SEEDS)] = Field(
        0, description="Seed of the order of rows, of initial weights and of dropout."
    )
    eval_every: NonNegative = Field(0, description="Steps between evaluations; 0: at the end.")
    eval_at_start: bool = Field(
        False, description="Evaluate before the first step too: with an adapter, the base model."
    )
    early_stopping: EarlyStoppingSection | None = Field(
        None, description="End the run when the evaluation loss no longer falls; null: never."
    )
    deterministic: bool = Field(
        False,
        description="Use only operations that give the same bits each time on the same devices "
        "and software; slower. The run says what the backend cannot promise.",
    )
    log_every: Positive = Field(1, description="Steps between lines of metrics.")
    throughput_warmup_steps: NonNegative = Field(
        3,
        description="First steps, also after resuming, that the summary's tokens_per_s leaves out: "
        "a device may compile in them.",
    )
    system_every_s: NonNegativeNumber = Field(
        10.0, description="Seconds between samples of host, process and device; 0: none."
    )

    trainable: list[_Expression] = Field(
        default_factory=list,
        description="Without an adapter: regular expressions for whole parameter names; only "
        "parameters that match one of them are trained. Empty: all weights.",
    )
    frozen: list[_Expression] = Field(
        default_factory=list,
        description="Without an adapter: the same; parameters that match one are not trained.",
    )

    @model_validator(mode="after")
    def _can_be_offloaded(self) -> TrainSection:
        if self.activation_offloading and self.activations.selective:
            raise ValueError(
                "'activation_offloading' does not reach what 'gradient_checkpointing' keeps with "
                "selective: true, since torch keeps it in another place; remove one of them"
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

    every: NonNegative | None = Field(
        None,
        description="Steps between checkpoints, and one after the last step; 0: only when the run "
        "is asked to end; null: with an adapter every 15 minutes and after the last step, without "
        "one as 0.",
    )
    keep_last: Positive = Field(2, description="How many of the newest checkpoints are kept.")
    keep_best: NonNegative = Field(
        0, description="Also kept: this many with the lowest evaluation loss."
    )
    result: Literal["last", "best"] = Field(
        "last",
        description="What the run saves in the end: what its last step left, or the checkpoint "
        "with the lowest evaluation loss, which implies keep_best: 1.",
    )
    grace_s: Seconds = Field(
        60.0,
        description="Seconds to end the step under way and write a checkpoint when asked to end.",
    )
    resume: str = Field(
        "never",
        description="never; auto, which takes the newest sound checkpoint of this run, if there is "
        "one; or the folder of a checkpoint.",
    )

    @property
    def num_best(self) -> int:
        """How many checkpoints with the lowest losses are kept: `result` may need one."""
        return max(self.keep_best, int(self.result == "best"))
