"""Which tool a file is of, by its keys; what it looks like where it is none that can be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anygauge.cli.imports import axolotl, habana, llamafactory, trainer
from anygauge.cli.imports.draft import Draft, load_table
from anygauge.cli.imports.engine_files import put_accelerate, put_deepspeed, read_mapping
from anygauge.config.document import MOST_BYTES
from anygauge.interface import RunFileError
from anygauge.util.files import read_bounded

READERS: dict[str, Callable[[Draft], None]] = {
    "Axolotl": axolotl.read_axolotl,
    "LLaMA-Factory": llamafactory.read_llamafactory,
    "TRL": trainer.read_trainer,
    "Trainer": trainer.read_trainer,
    "optimum-habana": habana.read_habana,
}
READ = (
    "it reads an Axolotl or LLaMA-Factory YAML, TrainingArguments or an SFTConfig as JSON or YAML, "
    "and a shell command with optimum-habana's run_lora_clm.py"
)
_LLAMAFACTORY = "finetuning_type stage cutoff_len dataset_dir lora_rank template lora_target"
_TRL = """max_length dataset_text_field assistant_only_loss completion_only_loss dataset_name lora_r
use_peft packing_strategy padding_free loss_type chat_template_path eval_packing load_in_4bit"""
_TRAINER = "per_device_train_batch_size num_train_epochs lr_scheduler_type optim output_dir"
_OTHERS = {
    "model data": "a run file of anygauge already: anygauge train {file}",
    "train_dataset dist_config": "version 1 of LLaMA-Factory, whose files are not read",
    "train_dataset model_class": "version 1 of LLaMA-Factory, whose files are not read",
    "model tokenizer optimizer": "a recipe of torchtune: docs/coming-from.md#torchtune",
    "architectures model_type": "a model's config.json",
    "peft_type": "an adapter's adapter_config.json: name its folder in adapter.start_from",
    "zero_optimization": "DeepSpeed's configuration: give it after the trainer's file",
    "distributed_type": "Accelerate's configuration: give it after the trainer's file",
    "compute_environment": "Accelerate's configuration: give it after the trainer's file",
}
"""Keys that a file has which is no trainer's -> what it looks like."""


def read_files(
    file: Path, others: list[Path], home: Path, devices: int | None, nodes: int
) -> Draft:
    """A file of another tool, with those beside it, as a draft of a run file.

    Raises:
        RunFileError: it is none of theirs, which names what it looks like; or a value is not valid.
    """
    tool, keys = _keys_of(file)
    draft = Draft(file=file, tool=tool, keys=keys, home=home, devices=devices, nodes=nodes)
    for other in others:
        _add(draft, other)
    try:
        READERS[tool](draft)
    except (TypeError, AttributeError) as error:
        what = f"a value is not of a type that {tool} has there ({error})"
        raise RunFileError(f"{file}: {what}; compare it with {tool}'s documentation") from None
    return draft


def _keys_of(file: Path) -> tuple[str, dict[str, Any]]:
    if file.is_file() and file.suffix not in (".yaml", ".yml", ".json"):
        text = read_bounded(file, MOST_BYTES).decode("utf-8", "replace")
        if habana.SCRIPT in text:
            return "optimum-habana", habana.read_command(text, str(file))
        if script := re.search(r"[\w./-]+\.py\b", text):
            raise RunFileError(f"{file}: looks like a command for {script[0]}; {READ}")
    values = read_mapping(file, str(file))
    return tool_of(values, file), values


def tool_of(values: Mapping[str, Any], file: Path) -> str:
    """The tool that has such keys.

    Raises:
        RunFileError: none that can be read.
    """
    keys = set(values)
    if "base_model" in keys:
        return "Axolotl"
    if len(keys & {*_LLAMAFACTORY.split()}) > 1:
        return "LLaMA-Factory"
    for needed, what in _OTHERS.items():
        if {*needed.split()} <= keys:
            raise RunFileError(f"{file}: looks like {what.format(file=file)}; {READ}")
    trainers = {*_TRAINER.split()}
    if keys & {*_TRL.split()} and keys & {*trainers, "dataset_name", "model_name_or_path"}:
        return "TRL"
    if 2 * len(keys & {*trainers, *load_table("trainer")["ours"]}) > len(keys):
        return "Trainer"
    first = ", ".join(list(map(str, values))[:8]) or "none"
    raise RunFileError(
        f"{file}: looks like none of the files that import reads (its keys: {first}); {READ}"
    )


def _add(draft: Draft, file: Path) -> None:
    """A file beside the trainer's: how the model is spread, or LLaMA-Factory's data sets."""
    values = read_mapping(file, str(file))
    if "zero_optimization" in values:
        put_deepspeed(draft, values, file.name)
    elif {"distributed_type", "compute_environment"} & values.keys():
        put_accelerate(draft, values, file.name)
    elif values and all(isinstance(one, dict) for one in values.values()):
        draft.keys |= {"dataset_info": values, "dataset_dir": str(file.parent)}
    else:
        raise RunFileError(
            f"{file}: a second file is DeepSpeed's JSON, Accelerate's YAML, or LLaMA-Factory's "
            f"dataset_info.json; this has {', '.join(list(map(str, values))[:8])}"
        )
