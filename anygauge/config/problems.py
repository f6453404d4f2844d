"""Describes what is wrong with a run file: one line for each complaint, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from anygauge.config.describe import LARGEST_SHOWN, Kind, meaning, sections
from anygauge.config.plugin_sections import PluginSection
from anygauge.config.tree import Problem, YamlNode, describe_value, dotted_path, is_private
from anygauge.util.section import Section
from anygauge.util.text import join_names

_YAML_BOOLEANS = ("yes", "no", "on", "off", "true", "false")

PEER_ALIASES = {
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
        "checkpoint.result: best": "load_best_model_at_end",
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
        "model.quantize": "quantization_bit quantise",
        "model.quantize.compute_dtype": "bnb_4bit_compute_dtype",
        "model.quantize.double_quantization": (
            "double_quantisation bnb_4bit_use_double_quant use_double_quant"
        ),
        "model.quantize: int8": "load_in_8bit 8bit",
        "model.quantize: nf4": "load_in_4bit 4bit int4 fp4 bnb_4bit_quant_type",
        "name": "run_name",
        "objective": "rl",
        "output": "output_dir",
        "precision.param_dtype": "dtype torch_dtype mixed_precision compute compute_dtype",
        "precision.param_dtype: bfloat16": "bf16 bfloat16 torch.bfloat16",
        "precision.param_dtype: float16": "fp16 float16 half torch.float16",
        "precision.param_dtype: float32": "fp32 float32 torch.float32",
        "precision.reduce_dtype": "reduce",
        "strategy.stage": "zero_stage",
        "trackers": "report_to",
        "train.deterministic": "full_determinism",
        "train.early_stopping.min_delta": "early_stopping_threshold",
        "train.early_stopping.patience": "early_stopping_patience",
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
        "train.schedule.name: warmup_stable_decay": "wsd",
        "train.schedule.name": "lr_scheduler_type lr_scheduler",
        "train.steps": "max_steps",
    }.items()
    for name in names.split()
}
"""What other fine-tuning tools call a field of ours, or its value -> ours; only ever used to
suggest, never to accept."""

_Path = tuple[object, ...]


def empty_sections(root: YamlNode, kind: Kind) -> Iterator[Problem]:
    """Complaints about sections that may be null, and stand there without a word."""
    for path, node in root.nodes():
        if node.value is None and not node.text:
            expected = kind.descendant(path)
            if expected is not None and expected.section and "null" in str(expected):
                text = "is left empty; give its fields, '{}' for all defaults, or null for none"
                yield Problem(node.origin, dotted_path(path), text)


def explain_errors(error: ValidationError, root: YamlNode, run: Kind) -> Iterator[Problem]:
    """One problem for each wrong field.

    Args:
        error: what pydantic said about the values of `root`.
        root: the merged tree, for places and for values as they were written.
        run: the type of `root`.
    """
    items = error.errors(include_url=False)
    paths = [_path(item["loc"], root, run) for item in items]
    # A union complains once for each of its members, about the value and about what is in it:
    # the innermost is the one to change.
    outer = {path[:length] for path in paths for length in range(len(path))}
    for item, path in zip(items, paths, strict=True):
        parent = run.descendant(path[:-1])
        section = None if parent is None else parent.section
        node = root.nearest(*path)
        if item["type"] == "missing" and section is not None and path[-1] == item["loc"][-1]:
            text = f"missing: {meaning(section.model_fields[str(path[-1])])}"
        elif item["type"] == "extra_forbidden" and section is not None:
            text = _unknown_field(path, section, chosen=root.get(*path[:-1], "name") is not None)
        elif item["type"] == "value_error":
            text = _refusal(path, str(item["ctx"]["error"]), root)
        elif path not in outer:
            text = _wrong_value(path, node, run.descendant(path) or Kind(Any))
        else:
            continue
        yield Problem(node.origin, dotted_path(path), text)


def _path(loc: tuple[int | str, ...], root: YamlNode, run: Kind) -> _Path:
    """`loc` without pydantic's names of union members, which are not part of the file."""
    path: _Path = ()
    for index, part in enumerate(loc):
        is_missing = index == len(loc) - 1 and isinstance(part, str) and _is_field(run, path, part)
        if is_missing or root.get(*path, part) is not None:
            path = (*path, part)
    return path


def _is_field(run: Kind, path: _Path, name: str) -> bool:
    kind = run.descendant(path)
    return kind is not None and kind.section is not None and name in kind.section.model_fields


def _unknown_field(path: _Path, section: type[Section], *, chosen: bool) -> str:
    """A field that a section does not have, with where the user may have wanted to go.

    Args:
        chosen: whether a plugin whose section it is was named.
    """
    name, here = str(path[-1]), dotted_path(path[:-1])
    valid = [*section.model_fields, *([] if here else ["extends"])]
    names = {
        theirs: ours.rpartition(".")[2]
        for theirs, ours in PEER_ALIASES.items()
        if ours.rpartition(".")[0] == here and ": " not in ours
    }
    names |= {field: field for field in valid}
    homes = _other_homes(name, path[:-1])
    others: list[str] = []
    hints = ["no such field"]
    if issubclass(section, PluginSection):
        others = [n for n, other in section.of_plugins().items() if name in other.model_fields]
        hints = [f"{name!r} is not a setting of {section.plugin_name}"]
    if others:
        hints.append(f"it is one of {join_names(others)}")
        if not chosen:
            hints.append(f"add {here}.name: {' or '.join(others)}")
    elif homes:
        hints.append(f"'{name}' belongs under {' or '.join(homes)}")
    elif name in PEER_ALIASES:
        hints.append(f"here that is '{PEER_ALIASES[name]}'")
    elif close := get_close_matches(name.lower(), names, n=1):
        hints.append(f"did you mean '{names[close[0]]}'?")
    elif near := get_close_matches(name.lower(), PEER_ALIASES, n=1, cutoff=0.85):
        hints.append(f"did you mean '{PEER_ALIASES[near[0]]}'?")
    said = "; ".join(hints)
    return f"{said}{' ' if said.endswith('?') else '; '}valid here: {', '.join(valid)}"


def _other_homes(field: str, here: _Path) -> list[str]:
    """The other sections that have a field of this name."""
    found = (path for path, section in sections() if field in section.model_fields)
    homes = dict.fromkeys([()] if field == "extends" else found)
    return [dotted_path(home) or "the top level" for home in homes if home != here]


def _refusal(path: _Path, text: str, root: YamlNode) -> str:
    """Return the message of a section's own check, with the places of the fields that it names."""
    places = [
        f"{name}: {node.origin}"
        for name in dict.fromkeys(re.findall(r"'(\w+)'", text))
        if (node := root.get(*path, name)) is not None and node.value is not None
    ]
    return f"{text} ({', '.join(places)})" if len(places) > 1 else text


def _wrong_value(path: _Path, node: YamlNode, expected: Kind) -> str:
    wanted = " or ".join(dict.fromkeys(map(_with_article, expected.members)))
    said = f"got {describe_value(node, private=is_private(path))}, expected {wanted}"
    return "; ".join([said, *_hints(node, expected), *_first(path, node, expected)])


def _with_article(kind: Kind) -> str:
    if kind.section is not None:
        return f"a mapping of {', '.join(kind.section.model_fields)}"
    text = str(kind)
    if len(kind.choices) == 1:
        return f"'{text}'"
    return text if text.startswith(("text", "null", "true", "one of", "any")) else f"a {text}"


def _hints(node: YamlNode, expected: Kind) -> Iterator[str]:
    value = node.value
    takes = {member.annotation for member in expected.members}
    if str in takes and isinstance(value, bool) and node.text.lower() in _YAML_BOOLEANS:
        yield f"put it in quotes, YAML reads {node.text} as {str(value).lower()}"
    elif str in takes and isinstance(value, int | float):
        yield "put it in quotes to make it text"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for member in expected.members:
            largest = member.bound("le")
            if largest is not None and value > largest >= LARGEST_SHOWN:
                yield f"the largest is {int(largest):_}"
    if int in takes and isinstance(value, float) and value.is_integer():
        yield f"write {int(value)}"
    if isinstance(value, str):
        for member in expected.members:
            longest = member.bound("max_length")
            if longest is not None and len(value) > longest:
                yield f"at most {longest} characters"
        choices = [choice for member in expected.members for choice in member.choices]
        close = [ours] if (ours := _value_here(value)) in choices else []
        close = close or get_close_matches(value, choices, n=1)
        if close and len(choices) > 1:
            yield f"did you mean '{close[0]}'?"
        if takes & {int, float} and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value):
            yield "write it without quotes and without leading zeros"


def _value_here(value: str) -> str:
    """A value of another tool's as it is called here; any other as it is."""
    return PEER_ALIASES.get(value, "").partition(": ")[2] or value


def _first(path: _Path, node: YamlNode, expected: Kind) -> Iterator[str]:
    """Where a text stands in place of a section: the field of it that the text is for."""
    chosen = any(member.choices for member in expected.members)
    if expected.section is None or chosen or not isinstance(node.value, str):
        return
    for name in ("name", "type", "path", "param_dtype"):
        value, field = _value_here(node.value), expected.child(name)
        section, choices = expected.section, () if field is None else field.choices
        if issubclass(section, PluginSection):
            choices = tuple(section.of_plugins())
        if field is not None and (value in choices or "text" in str(field)):
            yield f"write '{dotted_path((*path, name))}: {value}'"
            return
