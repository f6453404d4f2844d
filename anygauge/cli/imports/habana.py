"""optimum-habana's `run_lora_clm` command, as of its commit 1d8504c (January 2026, its last)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from anygauge.cli.imports.draft import (
    Draft,
    Table,
    as_number,
    given,
    not_offered,
    nothing,
    ours,
    positive,
)
from anygauge.cli.imports.engine_files import put_engine
from anygauge.cli.imports.trainer import (
    TRAINER,
    as_list,
    put_batch,
    put_evaluation,
    put_folder,
    put_optimizer,
    put_precision,
    put_schedule,
    put_trackers,
    targets,
)
from anygauge.config.document import read_yaml
from anygauge.config.tree import Origin, plain
from anygauge.interface import RunFileError

SCRIPT = "run_lora_clm.py"
_ADAPTER = "adapter: LoRA"
TABLE: Table = {
    **TRAINER,
    **ours("backend_options.graph_limit", "PT_HPU_MAX_COMPOUND_OP_SIZE", as_number),
    **ours("backend_options.graph_limit_sync", "PT_HPU_MAX_COMPOUND_OP_SYNC", bool),
    **ours("backend_options.sync_on_release", "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED", bool),
    **ours("backend_options.split_forward_backward", "pipelining_fwd_bwd"),
    **ours("backend_options.attention_recompute", "flash_attention_recompute"),
    **ours("backend_options.fast_softmax", "flash_attention_fast_softmax"),
    **ours("model.revision", "model_revision", lambda value: None if value == "main" else value),
    **ours("model.tokenizer", "tokenizer_name"),
    **ours("model.trust_remote_code", "trust_remote_code"),
    **ours("data.train.subset", "dataset_config_name"),
    **ours("data.train.limit", "max_train_samples", positive),
    **ours("train.throughput_warmup_steps", "throughput_warmup_steps", as_number),
    **nothing(
        "speed",
        "use_habana use_mpi use_hpu_graphs_for_inference use_hpu_graphs_for_training "
        "use_cache load_meta_device use_fused_rope distribution_strategy non_blocking_data_copy "
        "adjust_throughput gaudi_config_name use_flash_attention cache_size_limit use_fast_tokenizer "
        "use_zero3_leaf_promotion compile_from_sec_iteration minimize_memory "
        "PT_HPU_RECIPE_CACHE_CONFIG PT_HPU_GPU_MIGRATION LOG_LEVEL_ALL dataset_cache_directory "
        "keep_in_memory pad_to_max_length sdp_on_bf16 torch_compile torch_compile_backend",
    ),
    **nothing("logging", "max_eval_samples report_to profiling_steps profiling_warmup_steps "
              "profiling_record_shapes"),
    **nothing("naming", "save_last_ckpt dataset_seed"),
    **not_offered(_ADAPTER, "peft_type", ("lora",)),
    **not_offered("data.train.template, for a prompt of your own",
                  "sql_prompt chat_prompt instruction_column_name input_column_name output_column_name"),
    **not_offered("the line breaks of a .txt are kept", "keep_linebreaks", (True,)),
    **not_offered("strategy: zero, or fsdp out of lazy mode", "tensor_parallel_size context_parallel_size",
                  (0, 1)),
    **not_offered(_ADAPTER, "adapter_layers adapter_len ia3_target_modules feedforward_modules "
                  "adalora_init_r adalora_target_r vera_target_modules ln_target_modules"),
    **not_offered("precision.param_dtype", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST "
                  "PT_HPU_AUTOCAST_FP32_OPS_LIST"),
}  # fmt: skip
_WAITS = "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED=1"


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
    name, passed = "", False
    for word in words:
        if match := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", word):
            found[match[1]] = _value(match[2])
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = _value(value) if equals else True
        elif name and not word.endswith(".py"):
            before = found[name]
            value = _value(word)
            found[name] = value if before is True else [*as_list(before), value]
        passed = passed or word.endswith(SCRIPT)
        name = "" if word.endswith(".py") else name
    if not passed:
        raise RunFileError(f"{where}: no {SCRIPT} in this command")
    return found


def _value(word: str) -> Any:
    node = read_yaml(word, Origin("option", None, Path()), [], ()) if word.isascii() else None
    return word if node is None else plain(node)


def read_habana(draft: Draft) -> None:
    """Read the options of the script and of `gaudi_spawn.py`."""
    draft.put("backend", "hpu", "--use_habana")
    size = draft.number("world_size")
    draft.devices = draft.devices or size or 1
    lazy = draft.take("PT_HPU_LAZY_MODE"), draft.take("use_lazy_mode")
    mode = (
        "lazy"
        if True in lazy or 1 in lazy
        else "compile"
        if draft.keys.get("torch_compile")
        else "eager"
    )
    draft.put("backend_options.mode", mode, "PT_HPU_LAZY_MODE, --use_lazy_mode")
    _put_model(draft)
    draft.take("use_deepspeed")
    put_engine(draft)
    put_batch(draft, "per_device_train_batch_size", 8)
    draft.keys.setdefault("adam_epsilon", 1e-6)  # GaudiTrainingArguments
    put_optimizer(draft, "optim", "adamw_torch")
    put_schedule(draft, "lr_scheduler_type", "linear")
    if draft.keys.get("fp8"):
        draft.change("fp8: its scales are those of `anygauge_hpu`: docs/gaudi.md#fp8")
    put_precision(draft, "float32")
    put_evaluation(draft)
    put_folder(draft, "output_dir")
    put_trackers(draft)
    _put_attention(draft)
    _put_data(draft)
    draft.apply(TABLE)
    if draft.at("strategy.name") == "zero":
        draft.put("strategy.reentrant", True, "as its layers are recomputed")
        draft.default("train.max_grad_norm", 1.0)
    draft.default("train.optimizer.lr", 5e-5)
    draft.default("train.epochs", 3)
    draft.default("train.gradient_checkpointing", False)
    for text in (
        "name and output: --output_dir is both in one",
        "backend_options.recipe_cache: not set, so graphs are compiled in every process",
        f"backend_options.sync_on_release: the article's {_WAITS}, which the command no longer has",
        "train.micro_batch_size: evaluations have batches of this size as well",
        "train.throughput_warmup_steps: tokens in the time of steps are counted, not samples",
        "precision.reduce_dtype: gradients are reduced in float32 here, in bfloat16 there",
    ):
        field = text.partition(":")[0]
        if field != "backend_options.sync_on_release" or draft.at(field) is None:
            draft.change(text)


def _put_model(draft: Draft) -> None:
    name = draft.take("model_name_or_path")
    draft.put("model.name", draft.path(name), "--model_name_or_path")
    rank, alpha = draft.number("lora_rank", 8), draft.number("lora_alpha", 16)
    layers = draft.take("lora_target_modules")
    draft.put("adapter.r", rank, f"--lora_rank {rank}")
    draft.put("adapter.alpha", alpha, f"--lora_alpha {alpha}")
    draft.put("adapter.dropout", draft.number("lora_dropout", 0.05), "--lora_dropout")
    draft.put("adapter.targets", targets(layers or ["q_proj", "v_proj"]), "--lora_target_modules")


def _put_attention(draft: Draft) -> None:
    """Fused attention has a softmax of its own, which the other options do not reach."""
    kind = draft.take("attn_implementation")
    fused = draft.take("use_flash_attention") or kind in (
        "gaudi_fused_sdpa",
        "sdpa",
        "flash_attention_2",
    )
    half, causal = draft.take("attn_softmax_bf16"), draft.take("flash_attention_causal_mask")
    draft.put(
        "backend_options.attention",
        "fused" if fused else "softmax",
        given("attn_implementation", kind),
    )
    if fused:
        draft.change("backend_options.attention: fused, as the command's last options say")
        if half:
            draft.change(
                "backend_options.softmax: --attn_softmax_bf16 is ignored by fused attention"
            )
    else:
        draft.put(
            "backend_options.softmax", "bfloat16" if half else "float32", "--attn_softmax_bf16"
        )
    if causal:
        draft.skip(
            "flash_attention_causal_mask", "fused attention is causal wherever it can be", "speed"
        )


def _put_data(draft: Draft) -> None:
    name, file = draft.take("dataset_name"), draft.take("train_file")
    held, inputs = (
        draft.number("validation_split_percentage", 0),
        draft.take("train_on_inputs", True),
    )
    source = name or file
    draft.put(
        "data.train.path",
        draft.path(source),
        given("dataset_name" if name else "train_file", source),
    )
    plain_text = "guanaco" in str(source)
    draft.put("data.train.format", "text" if plain_text else "alpaca", "the script's prompts")
    if not plain_text:
        draft.change(
            'data.train.format: prompts end with "### Response:" there; here a line break follows'
        )
    if file and (checked := draft.take("validation_file")):
        draft.put("data.eval.path", draft.path(checked), given("validation_file", checked))
        draft.put("data.eval.format", "text" if plain_text else "alpaca", "the script's prompts")
    elif held:
        draft.put("data.eval_fraction", held / 100, f"--validation_split_percentage {held}")
        draft.change("data.eval_fraction: the first rows there; here rows drawn by train.seed")
    _, length = draft.take_first("max_seq_length max_seq_len", 512)
    draft.put("data.max_length", length, f"--max_seq_length {length}")
    draft.put("data.loss_on", "all" if inputs else "answer", f"train_on_inputs: {inputs}".lower())
    if draft.take("dataset_concatenation"):
        draft.put("data.packing", "concatenate", "--dataset_concatenation")
        draft.change(
            "data.packing: rows are cut at max_seq_length there; here a pack holds whole rows"
        )
