"""The schema in words: what a field takes, where a name belongs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import create_model
from pydantic.fields import FieldInfo

from anygauge.config.schema import RunFile
from anygauge.config.strategies import StrategySection, all_sections, section_of
from anygauge.config.tree import YamlNode
from anygauge.util.schema import Section

LARGEST_SHOWN = 100_000
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}

# What other fine-tuning tools call a field of ours, or its value; only ever used to suggest, never
# to accept.
ELSEWHERE = {
    name: ours
    for ours, names in {
        "adapter": "lora peft",
        "adapter.alpha": "lora_alpha",
        "adapter.dora": "use_dora",
        "adapter.dropout": "lora_dropout",
        "adapter.r": "lora_r lora_rank rank",
        "adapter.rslora": "use_rslora",
        "adapter.targets": "target_modules lora_target lora_targets lora_target_modules",
        "backend": "device accelerator",
        "checkpoint.every": "save_steps save_strategy save_every",
        "checkpoint.keep_last": "save_total_limit",
        "checkpoint.resume": "resume_from_checkpoint",
        "data.eval.path": "validation_file eval_file eval_dataset",
        "data.eval_fraction": "val_set_size test_size",
        "data.loss_on": "train_on_inputs train_on_input train_on_prompt completion_only_loss",
        "data.max_length": "cutoff_len max_seq_length max_seq_len seq_length sequence_len",
        "data.packing": "sample_packing",
        "data.train.path": "dataset datasets dataset_path dataset_name train_file train_dataset",
        "launch.devices": "nproc_per_node num_processes num_gpus gpus",
        "launch.nodes": "nnodes num_nodes num_machines",
        "model.attention": "attn_implementation flash_attention flash_attn",
        "model.name": "model_name_or_path model_name model_path base_model",
        "model.quantise": "quantization_bit quantize",
        "model.quantise: int8": "load_in_8bit 8bit",
        "model.quantise: nf4": "load_in_4bit 4bit int4 fp4 bnb_4bit_quant_type",
        "name": "run_name",
        "output": "output_dir",
        "precision.param_dtype": "dtype torch_dtype mixed_precision compute compute_dtype",
        "precision.param_dtype: bfloat16": "bf16 bfloat16 torch.bfloat16",
        "precision.param_dtype: float16": "fp16 float16 half torch.float16",
        "precision.param_dtype: float32": "fp32 float32 torch.float32",
        "precision.reduce_dtype": "reduce",
        "strategy.stage": "zero_stage",
        "trackers": "report_to",
        "train.epochs": "num_epochs num_train_epochs n_epochs max_epochs",
        "train.eval_at_start": "eval_on_start",
        "train.eval_every": "eval_steps eval_strategy evaluation_strategy",
        "train.global_batch_size": "batch_size",
        "train.global_batch_size: micro_batch_size x these x ranks": (
            "gradient_accumulation_steps grad_accumulation_steps accumulate_grad_batches"
        ),
        "train.log_every": "logging_steps",
        "train.max_grad_norm": "gradient_clipping gradient_clip_val grad_clip clip",
        "train.micro_batch_size": "per_device_train_batch_size",
        "train.optimizer.lr": "learning_rate",
        "train.optimizer.name": "optim",
        "train.optimizer.name: adamw": "adamw_torch adamw_torch_fused adamw_hf",
        "train.optimizer.name: adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit",
        "train.schedule.final_ratio": "min_lr_ratio",
        "train.schedule.name": "lr_scheduler_type lr_scheduler",
        "train.steps": "max_steps",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A type with its bounds: `annotation` is free of Annotated, `metadata` holds the bounds."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @staticmethod
    def of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
        """Splits Annotated[...] into type and metadata."""
        while get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            for item in more:
                metadata += tuple(item.metadata) if isinstance(item, FieldInfo) else (item,)
        return Kind(annotation, metadata)

    @property
    def members(self) -> tuple[Kind, ...]:
        """The alternatives of a union; of any other type, itself."""
        if get_origin(self.annotation) in (Union, types.UnionType):
            return tuple(Kind.of(member, self.metadata) for member in get_args(self.annotation))
        return (self,)

    @property
    def nullable(self) -> bool:
        """Whether null is a value of this type."""
        return any(member.annotation in (None, type(None), Any) for member in self.members)

    @property
    def section(self) -> type[Section] | None:
        """The section that this type is, null aside."""
        for member in self.members:
            if isinstance(member.annotation, type) and issubclass(member.annotation, Section):
                return member.annotation
        return None

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The sections that this type is, or is a list of; each once."""
        found: dict[type[Section], None] = {}
        for member in self.members:
            if get_origin(member.annotation) is list:
                member = Kind.of(get_args(member.annotation)[0])
            if member.section is not None:
                found[member.section] = None
        return tuple(found)

    def bound(self, name: str) -> Any:
        """A limit as pydantic names it (``le``, ``max_length``, ``pattern``); None without one."""
        found = (getattr(item, name, None) for item in self.metadata)
        return next((limit for limit in found if limit is not None), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal."""
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    def below(self, part: object) -> Kind | None:
        """The type of a field, an entry or an item of this one."""
        for member in self.members:
            origin, args = get_origin(member.annotation), get_args(member.annotation)
            if member.section is not None and isinstance(part, str):
                field = member.section.model_fields.get(part)
                return None if field is None else field_kind(field)
            if origin is dict:
                return Kind.of(args[1])
            if type(part) is int and origin is list:
                return Kind.of(args[0])
            if type(part) is int and origin is tuple:
                return Kind.of(args[part]) if part < len(args) else None
        return None

    def __str__(self) -> str:
        return " or ".join(self._words(member) for member in self.members)

    @staticmethod
    def _words(kind: Kind) -> str:
        origin, args = get_origin(kind.annotation), get_args(kind.annotation)
        if kind.annotation in (None, type(None)):
            return "null"
        if kind.annotation is Any:
            return "any value"
        if kind.section is not None:
            return "section"
        if kind.choices:
            return kind.choices[0] if len(args) == 1 else f"one of {', '.join(kind.choices)}"
        if origin is list:
            return f"list of {Kind.of(args[0])}"
        if origin is tuple:
            return f"list of {len(args)}: {', '.join(str(Kind.of(arg)) for arg in args)}"
        if origin is dict:
            return "mapping" if args[1] is Any else f"mapping of names to {Kind.of(args[1])}"
        word = _WORDS.get(kind.annotation, str(kind.annotation))
        bounds = [
            f"{sign} {limit:g}"
            for name, sign in _BOUNDS.items()
            if (limit := kind.bound(name)) is not None
            # Most of these no user meets; a complaint names the one that was passed.
            and not (name == "le" and limit >= LARGEST_SHOWN)
        ]
        if pattern := kind.bound("pattern"):
            bounds.append(f"matching {pattern}")
        return " ".join([word, " and ".join(bounds)]) if bounds else word


def kind_of_run(root: YamlNode) -> Kind:
    """A run file's type: its strategy section is that of the strategy which the tree names.

    Raises:
        PluginError: there is no such strategy.
    """
    node = root.get("strategy", "name")
    return _kind_with(section_of(None if node is None else node.value))


@cache
def _kind_with(section: type[StrategySection]) -> Kind:
    fields: dict[str, Any] = {"strategy": (section, ...)}
    return Kind(create_model(RunFile.__name__, __base__=RunFile, **fields))


def field_kind(field: FieldInfo) -> Kind:
    """The type of a section's field."""
    return Kind.of(field.annotation, tuple(field.metadata))


def kind_at(path: tuple[object, ...], root: YamlNode) -> Kind | None:
    """The type at a path of a run file; None where the schema has nothing."""
    kind: Kind | None = kind_of_run(root)
    for part in path:
        kind = None if kind is None else kind.below(part)
    return kind


def meaning(field: FieldInfo) -> str:
    """A field's description; for a section without one, what its class says first."""
    if field.description:
        return field.description
    section = field_kind(field).section
    return "" if section is None else (section.__doc__ or "").strip().splitlines()[0]


def sections() -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Every section with its path, outer ones first; the run file itself has the path ().

    The items of a list share the list's path, and all strategies that of theirs.
    """
    waiting: list[tuple[tuple[str, ...], type[Section]]] = [((), RunFile)]
    while waiting:
        path, section = waiting.pop(0)
        yield path, section
        waiting[:0] = [
            ((*path, name), inner)
            for name, field in section.model_fields.items()
            for kind in field_kind(field).sections
            for inner in (all_sections().values() if kind is StrategySection else (kind,))
        ]


def homes(name: str) -> tuple[str, ...]:
    """Dotted paths of the sections that have a field of this name; "" is the top level."""
    if name == "extends":
        return ("",)
    found = (".".join(path) for path, section in sections() if name in section.model_fields)
    return tuple(dict.fromkeys(found))
