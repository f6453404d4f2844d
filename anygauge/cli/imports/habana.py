"""optimum-habana's `run_lora_clm` command: what its table (`tables/habana.toml`) cannot say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from anygauge.cli.imports.draft import Draft, as_list, given
from anygauge.cli.imports.engine_files import put_engine
from anygauge.cli.imports.trainer import put_training
from anygauge.config.document import NotYaml, read_yaml
from anygauge.config.tree import Origin, plain_value
from anygauge.interface import RunFileError

SCRIPT = "run_lora_clm.py"
SYNC = "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED"
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
    _put_attention(draft)
    _put_data(draft)
    if draft.at("strategy.name") == "zero":
        draft.put("strategy.reentrant", True, "as its layers are recomputed")
        if draft.at("strategy.stage") == 3 and SYNC not in draft.keys:
            draft.change("backend_options.sync_on_release: not set; commands of release 1.15 had "
                         f"{SYNC}=1 for it")  # fmt: skip
    draft.apply("trainer", "habana")
    for text in DIFFERENCES:
        draft.change(text)


def _put_attention(draft: Draft) -> None:
    """Fused attention has a softmax of its own, which other options do not reach."""
    kind, half = draft.take("attn_implementation"), draft.take("attn_softmax_bf16")
    fused = draft.take("use_flash_attention") or kind == "gaudi_fused_sdpa"
    attention = "fused" if fused else "softmax"
    draft.put("backend_options.attention", attention, given("attn_implementation", kind))
    if not fused:
        draft.put("backend_options.softmax", "bfloat16" if half else "float32", "attn_softmax_bf16")
    elif half:
        draft.change("backend_options.attention: fused, which ignores --attn_softmax_bf16; "
                     "backend_options.softmax is left out")  # fmt: skip
    if draft.take("flash_attention_causal_mask"):
        draft.skip("flash_attention_causal_mask", "causal wherever it can be", "speed")


def _put_data(draft: Draft) -> None:
    name, *files = map(draft.take, ("dataset_name", "train_file", "validation_file"))
    form = "text" if "guanaco" in str(name) else "alpaca"
    for place, path in zip(("train", "eval"), [name] if name else files, strict=False):
        if path is not None:
            draft.put(f"data.{place}.path", path, "dataset_name, train_file")
            draft.put(f"data.{place}.format", form, "the script's prompts")
    if form == "alpaca":
        draft.change('data.train.format: prompts end with "### Response:" there, and with a line '
                     "break after it here")  # fmt: skip
    held = draft.number("validation_split_percentage", 0)
    if held and not draft.at("data.eval"):
        draft.put("data.eval_fraction", held / 100, f"validation_split_percentage: {held}")
        draft.change("data.eval_fraction: the first rows there; rows drawn by train.seed here")
    length = draft.take("max_seq_length", draft.take("max_seq_len", 512))
    draft.note("data.max_length", length, "max_seq_length")
    inputs = draft.take("train_on_inputs", True)
    draft.put("data.loss_on", "all" if inputs else "answer", f"train_on_inputs: {inputs}".lower())
