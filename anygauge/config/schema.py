"""Every field of a run file: its type, its default and what it means.

Pydantic checks a run file against these classes; `anygauge.config.load` reads the YAML and turns
pydantic's complaints into messages with file, line and the nearest valid name. Unknown fields are
errors everywhere. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


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

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.name is None) == (self.config is None):
            raise ValueError("give exactly one of 'name' (existing weights) and 'config' (random)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs a 'model_type', such as llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a model made from 'config' needs a 'tokenizer' as well")
        return self


class AdapterSection(Section):
    """A low-rank adapter (LoRA). Leave the section out to train all weights."""

    type: Literal["lora"] = Field("lora", description="Kind of adapter.")
    rank: Positive = Field(16, description="Inner dimension of the two factors.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        32, description="The update is scaled by alpha / rank."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Dropout on the adapter's input."
    )
    targets: str | list[str] = Field(
        "all-linear",
        description="all-linear, a list of layer names, or one regular expression.",
    )


class SourceSection(Section):
    """One file of rows and how to read them."""

    path: str = Field(description="A .json, .jsonl or .txt file.")
    form: Literal["auto", "prompt_completion", "alpaca", "text"] = Field(
        "auto", description="How a row is laid out; auto: told from path and columns."
    )
    prompt: str = Field("prompt", description="Column of the prompt (prompt_completion).")
    completion: str = Field("completion", description="Column of the answer (prompt_completion).")
    text: str = Field("text", description="Column of the text (form text in a JSON file).")
    template: str = Field(
        "{prompt}\n",
        description="What the model reads before the answer; {prompt} is replaced.",
    )
    limit: Positive | None = Field(None, description="Use only the first rows.")


class DataSection(Section):
    """Rows to train and evaluate on, and how they become tokens."""

    train: SourceSection = Field(description="Rows to train on.")
    eval: SourceSection | None = Field(None, description="Rows to evaluate on.")
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the training rows held out for evaluation instead."
    )
    max_length: Positive = Field(512, description="Most tokens in a row or pack.")
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="What becomes of rows beyond max_length."
    )
    loss_on: Literal["answer", "all"] = Field(
        "answer", description="Tokens that are learned: the answer's, or every token."
    )
    packing: bool = Field(False, description="Put several rows in one sequence; none sees another.")

    @model_validator(mode="after")
    def _one_eval(self) -> DataSection:
        if self.eval is not None and self.eval_fraction:
            raise ValueError("give 'eval' or 'eval_fraction', not both")
        return self


class OptimizerSection(Section):
    """AdamW."""

    name: Literal["adamw"] = Field("adamw", description="Optimizer.")
    lr: Annotated[float, Field(gt=0)] = Field(2e-4, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two moments.")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="Added to the denominator.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Decoupled decay.")


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


class TrainSection(Section):
    """The loop."""

    steps: Positive | None = Field(None, description="Optimizer steps; wins over epochs.")
    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="Passes over the rows.")
    global_batch: Positive = Field(
        16, description="Sequences per optimizer step over all ranks: fixes the learning curve."
    )
    micro_batch: Positive = Field(
        4, description="Sequences per forward on one rank: fixes memory; the rest accumulates."
    )
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Largest gradient norm; 0 for no clipping."
    )
    gradient_checkpointing: bool = Field(
        True, description="Recompute activations in backward to save memory."
    )
    seed: NonNegative = Field(0, description="Order, initial weights and dropout.")
    eval_every: NonNegative = Field(0, description="Steps between evaluations; 0: at the end.")
    eval_at_start: bool = Field(
        False, description="Evaluate before the first step too: with an adapter, the base model."
    )
    log_every: Positive = Field(1, description="Steps between lines of metrics.")


class PrecisionSection(Section):
    """Types of numbers, each named, so that two strategies can be compared."""

    compute: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Weights in memory and arithmetic; auto: bfloat16 where the hardware has it, "
        "else float16 where it has that, else float32.",
    )
    reduce: Literal["compute", "float32"] = Field(
        "float32", description="Type in which gradients are accumulated and reduced."
    )


class StrategySection(Section):
    """How the model is spread over ranks."""

    name: str = Field("zero", description="zero (DeepSpeed) or single (one process).")
    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        3, description="zero: what is sharded; 1 optimizer, 2 gradients, 3 weights too."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="zero: fields of DeepSpeed's zero_optimization that win over ours.",
    )


class LaunchSection(Section):
    """Where and how ranks are started."""

    launcher: str = Field("local", description="Name of the launcher.")
    nodes: Positive = Field(1, description="Machines.")
    devices: Positive = Field(1, description="Ranks per machine, one per device.")
    collective_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="A collective that hangs longer ends the run."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="For the launcher alone.")


class RunFile(Section):
    """One run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Short name.")
    output: str = Field(
        "runs", description="Folder for run directories; each run makes <output>/<name>."
    )
    backend: str = Field(
        "auto", description="A backend's name (`anygauge backends` lists them), or auto."
    )
    model: ModelSection
    adapter: AdapterSection | None = None
    data: DataSection
    train: TrainSection = TrainSection()
    precision: PrecisionSection = PrecisionSection()
    strategy: StrategySection = StrategySection()
    launch: LaunchSection = LaunchSection()
    kernels: dict[str, str] = Field(
        default_factory=dict,
        description="Operation: kernel name, which must be able to run here; recorded.",
    )
    backend_options: dict[str, Any] = Field(
        default_factory=dict, description="For the backend alone."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables for every rank; win over the backend's."
    )
    trackers: list[str] = Field(
        default_factory=list, description="Receivers of metrics besides metrics.jsonl."
    )
