"""optimum-habana's `run_lora_clm` command: what its table (`tables/habana.toml`) cannot say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from anygauge.cli.imports.draft import Draft, as_list, given, targets
from anygauge.cli.imports.engine_files import put_engine
from anygauge.cli.imports.trainer import put_training
from anygauge.config.document import NotYaml, read_yaml
from anygauge.config.tree import Origin, plain_value
from anygauge.interface import RunFileError

SCRIPT = "run_lora_clm.py"
SYNC = "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP"
DIFFERENCES = (
    "name and output: --output_dir is both in one",
    "backend_options.recipe_cache: not set, so every process compiles its graphs",
    "train.micro_batch_size: evaluations have batches of this size as well",
    "train.throughput_warmup_steps: tokens in the time of steps are counted, not samples",
    "precision.reduce_dtype: gradients are reduced in float32 here, in bfloat16 there",
)
"""Of every command."""


def read_command(text: str, where: str) -> dict[str, Any]:
    """The options and variables of a shell command that runs the script.

    Raises:
        RunFileError: it is no such command.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise RunFileError(f"{where}: is not a shell command: {error}") from None
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if match := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", word):
            found[match[1]] = _value(match[2])
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = _value(value) if equals else True
        elif word.endswith(".py"):
            name = ""
        elif name:
            before = found[name]
            found[name] = _value(word) if before is True else [*as_list(before), _value(word)]
    return found


def _value(word: str) -> Any:
    try:
        node = read_yaml(word, Origin("option", None, Path()), [], ())
    except NotYaml:
        return word
    return word if node is None else plain_value(node)


def read_habana(draft: Draft) -> None:
    """Read the options of the script and of `gaudi_spawn.py`."""
    draft.devices = draft.devices or draft.number("world_size", 1)
    draft.take("use_deepspeed")
    lazy = draft.take("PT_HPU_LAZY_MODE") == 1 or draft.take("use_lazy_mode") is True
    draft.take("use_lazy_mode")
    mode = "lazy" if lazy else "compile" if draft.keys.get("torch_compile") else "eager"
    draft.put("backend_options.mode", mode, "PT_HPU_LAZY_MODE, use_lazy_mode")
    put_engine(draft)
    draft.keys.setdefault("adam_epsilon", 1e-6)  # the default of GaudiTrainingArguments
    put_training(draft, "float32")
    draft.keys["model_name_or_path"] = draft.path(draft.keys.get("model_name_or_path"))
    for key, path, usual in (
        ("model_name_or_path", "model.name", None),
        ("lora_rank", "adapter.r", 8),
        ("lora_alpha", "adapter.alpha", 16),
        ("lora_dropout", "adapter.dropout", 0.05),
    ):
        draft.copy(key, path, usual)
    layers = draft.take("lora_target_modules", ["q_proj", "v_proj"])
    draft.put("adapter.targets", targets(layers), "lora_target_modules")
    _put_attention(draft)
    _put_data(draft)
    if draft.at("strategy.name") == "zero":
        draft.put("strategy.reentrant", True, "as its layers are recomputed")
        if (
            draft.at("strategy.stage") == 3
            and "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED" not in draft.keys
        ):
            draft.change("backend_options.sync_on_release: not set; commands of release 1.15 had "
                         f"{SYNC}_REQUIRED=1 for it")  # fmt: skip
    draft.apply("trainer", "habana")
    draft.defaults(train__optimizer__lr=5e-5, train__epochs=3, train__gradient_checkpointing=False)
    for text in DIFFERENCES:
        draft.change(text)


def _put_attention(draft: Draft) -> None:
    """Fused attention has a softmax of its own, which other options do not reach."""
    kind, half = draft.take("attn_implementation"), draft.take("attn_softmax_bf16")
    fused = draft.take("use_flash_attention") or kind == "gaudi_fused_sdpa"
    causal = draft.take("flash_attention_causal_mask")
    attention = "fused" if fused else "softmax"
    draft.put("backend_options.attention", attention, given("attn_implementation", kind))
    if not fused:
        draft.put("backend_options.softmax", "bfloat16" if half else "float32", "attn_softmax_bf16")
    elif half:
        draft.change("backend_options.attention: fused, which ignores --attn_softmax_bf16; "
                     "backend_options.softmax is left out")  # fmt: skip
    if causal:
        draft.skip("flash_attention_causal_mask", "causal wherever it can be", "speed")


def _put_data(draft: Draft) -> None:
    name, file, checked = (
        draft.take(key) for key in ("dataset_name", "train_file", "validation_file")
    )
    held, inputs = (
        draft.number("validation_split_percentage", 0),
        draft.take("train_on_inputs", True),
    )
    form = "text" if "guanaco" in str(name) else "alpaca"
    for place, path in (("train", name or file), ("eval", None if name else checked)):
        if path is not None:
            draft.put(f"data.{place}.path", draft.path(path), "dataset_name, train_file")
            draft.put(f"data.{place}.format", form, "the script's prompts")
    if form == "alpaca":
        draft.change('data.train.format: prompts end with "### Response:" there, and with a line '
                     "break after it here")  # fmt: skip
    if held and not draft.at("data.eval"):
        draft.put("data.eval_fraction", held / 100, f"validation_split_percentage: {held}")
        draft.change("data.eval_fraction: the first rows there; rows drawn by train.seed here")
    length = draft.take("max_seq_length", draft.take("max_seq_len", 512))
    draft.put("data.max_length", length, f"max_seq_length: {length}")
    draft.put("data.loss_on", "all" if inputs else "answer", f"train_on_inputs: {inputs}".lower())
    if draft.take("dataset_concatenation"):
        draft.put("data.packing", "concatenate", "dataset_concatenation")
        draft.change(
            "data.packing: rows are cut at max_seq_length there; packs hold whole rows here"
        )
