"""The sections `model` and `adapter` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from anygauge.config.section import Positive, PositiveNumber, Section


class QuantiseSection(Section):
    """How the base's linear layers are quantised; they stay frozen, beside an adapter."""

    type: Literal["nf4", "int8"] = Field(
        description="Codes: 4 bits (nf4) or 8 (int8), by bitsandbytes."
    )
    double_quantisation: bool = Field(
        False, description="nf4 alone: scales of blocks are quantised as well."
    )
    compute_dtype: Literal["param_dtype", "float32", "bfloat16", "float16"] = Field(
        "param_dtype", description="nf4 alone: type of the products with dequantised weights."
    )

    @model_validator(mode="after")
    def _fits_type(self) -> QuantiseSection:
        given = self.double_quantisation or self.compute_dtype != "param_dtype"
        if self.type == "int8" and given:
            raise ValueError("'double_quantisation' and 'compute_dtype' are for type nf4 alone")
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
        description="Further ones that are special: marks of turns, which no answer shows.",
    )
    new_tokens_init: Literal["mean", "normal"] = Field(
        "mean",
        description="What rows of new tokens begin with: the mean of the rows before, or drawn "
        "from the seed with their mean and covariance.",
    )
    quantise: Literal["nf4", "int8"] | QuantiseSection | None = Field(
        None, description="Quantise linear layers while they are read: a type, or a section."
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


class AdapterGroup(Section):
    """Layers of an adapter that have a rank or scale of their own."""

    targets: str | list[str] = Field(
        description="As in adapter.targets: layers that it names, and further ones."
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
    targets: str | list[str] = Field(
        "all-linear",
        description="all-linear (all but the output layer), a list of the last parts of layer "
        "names (all-linear, embeddings and the output layer too), or one regular expression over "
        "whole names.",
    )
    groups: list[AdapterGroup] = Field(
        default_factory=list,
        description="Further layers, or some of `targets`, with a rank and scale of their own.",
    )
    target_parameters: list[str] = Field(
        default_factory=list,
        description="Tensors that belong to no layer of their own, by the last parts of their "
        "names, such as experts.gate_up_proj of a mixture of experts.",
    )
    start_from: str | None = Field(
        None,
        description="Folder of an adapter to continue from; its rank, scale and targets are kept, "
        "and the fields above, dropout aside, must be left out or equal.",
    )
    verify: bool = Field(
        True,
        description="Load what was saved onto a fresh base on the host, and compare its logits.",
    )
    init: bool | str = Field(
        True,
        description="How factors begin, as peft's init_lora_weights has it: true, false, gaussian, "
        "orthogonal, pissa or olora.",
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Modules that are trained whole and saved beside the factors, by the ends of "
        "their names, such as mlp.gate for routers, or embed_tokens.",
    )

    @property
    def given(self) -> frozenset[str]:
        """Of the fields that `start_from` decides, those that the run file gives."""
        return _DECIDED_BY_START & self.model_fields_set

    @property
    def left_out(self) -> frozenset[str]:
        """Of the fields that `start_from` decides, those that the run file does not give."""
        return _DECIDED_BY_START - self.model_fields_set
