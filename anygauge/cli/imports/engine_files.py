"""How others spread a model: DeepSpeed's JSON, FSDP's options, Accelerate's YAML around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.cli.imports.draft import Draft, as_number, given
from anygauge.config.document import read_document
from anygauge.config.tree import Problem, plain_value, run_file_error
from anygauge.interface import RunFileError
from anygauge.util.text import flatten_values


def read_mapping(path: Path, shown: str) -> dict[str, Any]:
    """A YAML or JSON file with a mapping at its top.

    Raises:
        RunFileError: it is none.
    """
    problems: list[Problem] = []
    found: dict[str, Any] = plain_value(read_document(path, shown, problems))
    if problems:
        raise run_file_error(shown, problems)
    return found


def find_beside(draft: Draft, name: str) -> Path:
    """A file that theirs names: from here, or from its folder or one above it.

    Raises:
        RunFileError: there is none.
    """
    for folder in (Path.cwd(), *draft.file.absolute().parents):
        if (found := folder / name).is_file():
            return found
    raise RunFileError(
        f"{draft.file}: names {name}, which is neither in the current directory nor beside "
        f"{draft.file.name} or above it. Give it as well: anygauge import {draft.file} PATH"
    )


def put_deepspeed(draft: Draft, values: Mapping[str, Any], name: str) -> None:
    """Read DeepSpeed's configuration; what says `auto` is left to the trainer, here as there."""
    flat = {key: value for key, value in flatten_values(values) if value != "auto"}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        flat.pop(key, None)  # the trainer's
    steps = "gradient_accumulation_steps"
    draft.keys.setdefault(steps, flat.pop(steps, None))
    for kind in ("bf16", "fp16"):
        if flat.pop(f"{kind}.enabled", None):
            draft.keys.setdefault(kind, True)
    draft.put("strategy.name", "zero", name)
    draft.put("strategy.stage", 0, "DeepSpeed's default")
    away = [
        ours
        for ours, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param"))
        if flat.pop(f"zero_optimization.{key}.device", None) not in (None, "none")
    ]
    if away:
        draft.put("strategy.offload", away[0] if len(away) == 1 else "both", f"{name}: offload_*")
    draft.apply("engines", values=flat, above=f"{name}: ")


def put_fsdp(draft: Draft, options: Any, values: Mapping[str, Any], name: str = "fsdp") -> None:
    """Read FSDP's options: ``full_shard auto_wrap`` as text, list or true, and its mapping."""
    words = options.split() if isinstance(options, str) else options
    flat = {key.removeprefix("fsdp_").lower(): value for key, value in values.items()}
    said = [flat.pop("reshard_after_forward", None), flat.pop("sharding_strategy", None)]
    said = [str(word).lower() for word in [*said, *(words if isinstance(words, list) else [])]]
    draft.put("strategy.name", "fsdp", given(name, options) if options else f"{name}_config")
    if flat.pop("offload_params", flat.pop("cpu_offload", False)) or "offload" in said:
        draft.put("strategy.offload", "both", f"{name}_config: offload_params")
    if {"false", "shard_grad_op", "hybrid_shard_zero2"} & {*said}:
        draft.put("strategy.gather", "step", f"{name}_config: weights are gathered once a step")
    if any(word.startswith("hybrid_shard") for word in said) and draft.nodes > 1:
        draft.put("strategy.dp_replicate", draft.nodes, f"{name}: hybrid_shard")
    draft.apply("engines", values=flat, above=f"{name}_config: ")


def put_accelerate(draft: Draft, values: dict[str, Any], name: str) -> None:
    """Read what ``accelerate config`` wrote."""
    left = dict(values)
    kind, mixed = str(left.pop("distributed_type", "NO")).upper(), left.pop("mixed_precision", "no")
    try:
        draft.nodes = as_number(left.pop("num_machines", 1))
        ranks = as_number(left.pop("num_processes", 1))
        draft.devices = draft.devices or max(ranks // draft.nodes, 1)
    except (TypeError, ValueError, ZeroDivisionError):
        raise RunFileError(f"{name}: num_machines, num_processes: whole numbers from 1") from None
    if mixed in ("bf16", "fp16", "fp8"):
        draft.keys.setdefault(mixed, True)
    fsdp, zero = left.pop("fsdp_config", None) or {}, dict(left.pop("deepspeed_config", None) or {})
    if kind == "FSDP":
        put_fsdp(draft, None, fsdp, f"{name}: fsdp")
    elif kind == "DEEPSPEED" and not zero.get("deepspeed_config_file"):
        section = {"stage": zero.pop("zero_stage", 2)}
        for part in ("optimizer", "param"):
            section[f"offload_{part}"] = {"device": zero.pop(f"offload_{part}_device", "none")}
        zero.pop("zero3_save_16bit_model", None)
        names = ("gradient_clipping", "gradient_accumulation_steps")
        others = {key: zero.pop(key, "auto") for key in names}
        put_deepspeed(draft, {"zero_optimization": section, **others}, name)
    elif kind not in ("NO", "DEEPSPEED") and not kind.startswith("MULTI_"):
        draft.block(f"{name}: distributed_type", kind, "strategy: fsdp, ddp or zero")
    left |= {f"deepspeed_config.{key}": value for key, value in zero.items()}
    draft.apply("engines", values=dict(flatten_values(left)), above=f"{name}: ")


def put_engine(draft: Draft) -> None:
    """Read the keys `deepspeed`, `fsdp` and `fsdp_config`, and the files that they name."""
    zero, options, values = map(draft.take, ("deepspeed", "fsdp", "fsdp_config"))
    if isinstance(zero, str) and draft.at("strategy.name") != "zero":  # else it was given as a file
        put_deepspeed(draft, read_mapping(find_beside(draft, zero), zero), Path(zero).name)
    elif isinstance(zero, dict):
        put_deepspeed(draft, zero, "deepspeed")
    elif zero is not None and not isinstance(zero, str):
        raise draft.error("deepspeed", zero, "a file")
    if isinstance(values, str):
        values = read_mapping(find_beside(draft, values), values)
    if not isinstance(options, bool | str | list | None):
        raise draft.error("fsdp", options, "options as text or list")
    if not isinstance(values, dict | None):
        raise draft.error("fsdp_config", values, "a mapping, or a file")
    if (options or values) and zero is None:
        put_fsdp(draft, options, values or {})
    is_other = draft.at("strategy.name") == "fsdp" or draft.at("strategy.offload")
    if draft.keys.get("fp8") and is_other:
        stage = draft.at("strategy.stage") or 3
        draft.tree.pop("strategy")
        draft.put("strategy.name", "zero", "FP8 was tried with zero, without offload")
        draft.put("strategy.stage", stage, "the same")
        text = "zero without offload, in place of theirs: FP8 was tried with no other"
        draft.change(f"strategy: {text}")
