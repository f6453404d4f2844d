"""LLaMA-Factory's YAML, as of its commit ff6d4d1 (18 August 2026), not that of its version 1."""

from __future__ import annotations

import json
import re
from typing import Any

from anygauge.cli.imports.draft import (
    Draft,
    Leaf,
    Table,
    as_number,
    given,
    not_offered,
    nothing,
    ours,
)
from anygauge.cli.imports.engine_files import find_beside, put_engine, read_mapping
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
from anygauge.interface import RunFileError

_OPTIMIZER = "train.optimizer.name: adamw or adamw_8bit"
_LOOP = "a loop of your own: examples/own_loop.py"
_STAGE = "stage: sft or pt; TRL for the others"
TABLE: Table = {
    **TRAINER,
    **ours("model.trust_remote_code", "trust_remote_code"),
    **ours("model.revision", "model_revision"),
    **ours("data.max_length", "cutoff_len", as_number),
    **ours("data.streaming", "streaming"),
    **ours("data.shuffle_buffer", "buffer_size", as_number),
    **ours("data.shuffle", "disable_shuffling", lambda value: not value),
    **ours("train.optimizer.loraplus_lr_ratio", "loraplus_lr_ratio", as_number),
    **ours("train.gradient_checkpointing", "disable_gradient_checkpointing", lambda value: not value),
    **ours("train.router_aux_loss_coef", "moe_aux_loss_coef", as_number),
    **ours("adapter.dropout", "lora_dropout", as_number),
    **ours("adapter.rslora", "use_rslora"),
    **ours("adapter.dora", "use_dora"),
    **ours("adapter.modules_to_save", "additional_target", as_list),
    **ours("adapter.init", "pissa_init", lambda value: "pissa" if value else None),
    **ours("model.new_tokens", "add_tokens", as_list),
    **ours("model.new_special_tokens", "add_special_tokens", as_list),
    **nothing(
        "speed",
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels use_reentrant_gc "
        "disable_dataset_shared_memory preprocessing_batch_size use_fast_tokenizer data_shared_file_system "
        "pissa_iter fsdp_transformer_layer_cls_to_wrap fp8_backend fp8_enable_fsdp_float8_all_gather "
        "ray_storage_path ray_init_kwargs placement_strategy image_max_pixels image_min_pixels "
        "video_max_pixels video_min_pixels video_fps video_maxlen infer_backend upcast_layernorm "
        "upcast_lmhead_output resize_vocab quantization_device_map use_kv_cache shift_attn",
    ),
    **nothing("logging", "include_effective_tokens_per_second include_num_input_tokens_seen "
              "compute_accuracy use_swanlab swanlab_project swanlab_run_name swanlab_mode"),
    **nothing("naming", "tokenized_path ray_run_name export_dir"),
    **nothing("upload", "hf_hub_token ms_hub_token om_hub_token"),
    **not_offered(_OPTIMIZER, "use_galore use_apollo use_badam use_adam_mini use_muon galore_layerwise "
                  "galore_rank galore_scale galore_target apollo_rank apollo_scale apollo_scale_type "
                  "apollo_target apollo_layerwise badam_mode badam_switch_interval badam_switch_mode "
                  "badam_verbose"),
    **not_offered(_LOOP, "use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha "
                  "neftune_noise_alpha mixture_of_depths"),
    **not_offered("adapter: LoRA", "oft_block_size oft_target oft_rank use_llama_pro"),
    **not_offered("adapters of pissa are saved for the base as it was", "pissa_convert", (True,)),
    **not_offered("train.trainable: expressions over names of weights",
                  "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules"),
    **not_offered("the model that it was made from", "kt_weight_path kt_non_expert_weight_path"),
    **nothing("speed", "use_kt kt_cpu_activation"),
    **not_offered(_STAGE, "pref_beta pref_loss pref_ftx ref_model reward_model kto_chosen_weight"),
    **not_offered("LLaMA-Factory itself, for images and sound",
                  "freeze_vision_tower freeze_multi_modal_projector freeze_language_model"),
    # Megatron spreads the model over ranks, which changes no result.
    **nothing("speed", "use_mca use_megatron_bridge virtual_pipeline_model_parallel_size "
              "expert_model_parallel_size sequence_parallel recompute_granularity moe_grouped_gemm "
              "moe_token_dispatcher_type overlap_param_gather overlap_grad_reduce use_distributed_optimizer "
              "bias_activation_fusion apply_rope_fusion mixed_precision export_hf_on_finish"),
    **not_offered("checkpoint.keep_best: 1", "early_stopping_steps"),
    **not_offered("data.packing", "use_packed_sequences"),
    **not_offered("exact weights: data.train.weight", "interleave_probs"),
    **not_offered("all rows of all sources", "mix_strategy", ("concat",)),
    **not_offered("adapter.start_from goes on with the adapter itself", "create_new_adapter"),
    **not_offered("`anygauge merge`", "export_size export_quantization_bit"),
}  # fmt: skip
FAMILIES = {
    "llama3": "llama-3.*instruct",
    "qwen3": "qwen3-",
    "qwen3_nothink": "qwen3-",
    "qwen3_5": "qwen3[.]5",
    "qwen3_5_nothink": "qwen3[.]5",
    "qwen": "qwen2[.]5",
    "deepseek": "deepseek-v2",
    "gemma": "gemma-(2-)?.*-it",
    "gemma3": "gemma-3-.*-it",
    "mistral": "mistral-.*instruct",
    "phi4": "phi-4",
    "deepseek3": "deepseek-v3",
    "llama2": "llama-2-.*chat",
}
"""Its templates -> models whose own tokenizer has the template that it is a copy of."""


def read_llamafactory(draft: Draft) -> None:
    """Read LLaMA-Factory's keys."""
    stage, kind = draft.take("stage", "sft"), draft.take("finetuning_type", "lora")
    if stage not in ("sft", "pt"):
        draft.block("stage", stage, _STAGE)
    if not draft.keys.get("do_train", True) or draft.keys.get("export_dir"):
        draft.block("do_train", False, "this file does not train")
    _put_model(draft)
    put_engine(draft)
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if (ranks := draft.number(key, 1)) > 1:
            draft.sharing *= ranks
            draft.skip(key, ranks, "speed")
    draft.devices = draft.devices or (draft.sharing if draft.sharing > 1 else None)
    if workers := draft.number("ray_num_workers"):
        draft.devices = draft.devices or workers
    put_batch(draft, "per_device_train_batch_size", 8)
    put_optimizer(draft, "optim", "adamw_torch")
    put_schedule(draft, "lr_scheduler_type", "linear")
    put_precision(draft, "float32")
    put_evaluation(draft)
    put_folder(draft, "output_dir")
    put_trackers(draft)
    form = draft.mapping("kt_config").get("kt_expert_weight_format", "bf16")
    if form != "bf16":
        draft.block("kt_config: kt_expert_weight_format", form, "experts in 16 bits: strategy: fsdp")
    _put_adapter(draft, kind)
    _put_data(draft, stage)
    draft.apply(TABLE)
    draft.default("train.optimizer.lr", 5e-5)
    draft.default("train.epochs", 3)
    draft.default("data.max_length", 2048)
    draft.default("train.seed", 42)


def _put_model(draft: Draft) -> None:
    name = draft.take("model_name_or_path")
    draft.put("model.name", draft.path(name), given("model_name_or_path", name))
    if re.search("awq|gptq|aqlm|-int4", str(name), re.IGNORECASE):
        draft.block(
            "model_name_or_path", name, "the model that it was made from, with model.quantize"
        )
    bits, method = draft.take("quantization_bit"), draft.take("quantization_method", "bnb")
    if bits is None:
        draft.take("double_quantization")
        return
    if bits not in (4, 8) or method not in ("bnb", "bitsandbytes"):
        draft.block("quantization_method", f"{method}, {bits} bits", "model.quantize: nf4 or int8")
        return
    double = draft.take("double_quantization", True)
    draft.put("model.quantize.type", "nf4" if bits == 4 else "int8", f"quantization_bit: {bits}")
    if bits == 4:
        if (form := draft.take("quantization_type", "nf4")) != "nf4":
            draft.block("quantization_type", form, "model.quantize: nf4")
        draft.put(
            "model.quantize.double_quantization", double, given("double_quantization", double)
        )


def _put_adapter(draft: Draft, kind: Any) -> None:
    rank, alpha = draft.number("lora_rank", 8), draft.number("lora_alpha")
    layers, start = draft.take("lora_target", "all"), draft.take("adapter_name_or_path")
    if kind == "full":
        return
    if kind != "lora":
        draft.block("finetuning_type", kind, "finetuning_type: lora or full")
        return
    if (steps := draft.take("pissa_iter")) is not None and draft.keys.get("pissa_init"):
        draft.change(f"pissa_iter: {steps}: factors come from a fast SVD there, from an exact one here")
    if start is not None:
        draft.put("adapter.start_from", draft.path(start), given("adapter_name_or_path", start))
        return
    draft.put("adapter.r", rank, f"lora_rank: {rank}")
    draft.put("adapter.alpha", alpha or 2 * rank, f"lora_alpha: {alpha or 'twice the rank'}")
    draft.put("adapter.targets", targets(layers), given("lora_target", layers))


def _put_data(draft: Draft, stage: Any) -> None:
    folder, most = draft.take("dataset_dir", "data"), draft.number("max_samples")
    names, evaluated = as_list(draft.take("dataset", [])), as_list(draft.take("eval_dataset", []))
    share, template = draft.number("val_size", 0), draft.take("template")
    packed, neat = draft.take("packing", stage == "pt"), draft.take("neat_packing", False)
    prompts, history = draft.take("train_on_prompt", False), draft.take("mask_history", False)
    if names or evaluated:
        table = draft.take("dataset_info")
        if table is None:
            place = f"{folder}/dataset_info.json"
            if str(folder).startswith(("REMOTE:", "ONLINE")):
                place = "data/dataset_info.json"
                draft.change(
                    f"dataset_dir: {folder}: {place} beside the file has its data sets here"
                )
            path = find_beside(draft, place)
            table, folder = read_mapping(path, place), str(path.parent)
        for place, chosen in (("train", names), ("eval", evaluated)):
            found = [_source(draft, name, table, str(folder), most, stage) for name in chosen]
            if found:
                draft.put(f"data.{place}", found[0] if len(found) == 1 else found, "")
    if share >= 1:
        draft.block("val_size", share, "data.eval_fraction: a share of the rows")
    elif share:
        draft.put("data.eval_fraction", share, given("val_size", share))
    if neat:
        draft.put("data.packing", "isolate", "neat_packing: true")
    elif packed:
        draft.put("data.packing", "concatenate", given("packing", packed))
        if stage == "pt":
            draft.change(
                "stage: pt joins rows and cuts them at cutoff_len; here packs hold whole rows"
            )
    if stage != "pt":
        loss = "all" if prompts else "last_turn" if history else "answer"
        draft.put(
            "data.loss_on", loss, f"train_on_prompt: {prompts}, mask_history: {history}".lower()
        )
        draft.change("rows beyond cutoff_len: prompt and answer are cut there, here the end")
        _put_template(draft, template)


def _put_template(draft: Draft, name: Any) -> None:
    thinking = draft.take("enable_thinking")
    if thinking is not None:
        draft.put(
            "data.chat_template_kwargs.enable_thinking",
            thinking,
            given("enable_thinking", thinking),
        )
    model = str(draft.at("model.name")).lower().rpartition("/")[2]
    if name in FAMILIES and re.search(FAMILIES[name], model):
        draft.change(
            f"template: {name} is LLaMA-Factory's own; here the tokenizer's, of the same family"
        )
    elif name is not None:
        draft.block("template", name, "data.chat_template: a file, or a name of docs/data.md#chats")


def _source(
    draft: Draft, name: str, table: dict[str, Any], folder: str, most: Any, stage: Any
) -> dict[str, Leaf]:
    """A data set of `dataset_info.json` as a source."""
    entry = table.get(name)
    if not isinstance(entry, dict):
        raise RunFileError(f"{draft.file}: dataset: {name} is not in dataset_info.json, which has "
                           f"{', '.join(list(table)[:20])}")  # fmt: skip
    left, columns, key = dict(entry), dict(entry.get("columns") or {}), f"dataset: {name}"
    hub, local = left.pop("hf_hub_url", None), left.pop("file_name", None)
    tags = left.pop("tags", {})
    for word in (
        "columns",
        "ms_hub_url",
        "om_hub_url",
        "formatting",
        "script_url",
        "cloud_file_name",
    ):
        left.pop(word, None)
    found = {"path": Leaf(hub or draft.local(f"{folder}/{local}"), key)}
    if not hub and not local:
        draft.block(
            key, json.dumps(entry)[:60], "data.train.path: a file, or a data set of the hub"
        )
    for theirs, field in (("subset", "subset"), ("split", "split"), ("num_samples", "limit")):
        if theirs in left:
            found[field] = Leaf(left.pop(theirs), f"{key}: {theirs}")
    if most is not None:
        limit = min(most, found["limit"].value) if "limit" in found else most
        found["limit"] = Leaf(limit, f"max_samples: {most}")
    if entry.get("ranking") or {"images", "videos", "audios", "chosen", "kto_tag"} & columns.keys():
        draft.block(key, "images, sound or preferences", "rows of text with answers")
    elif left:
        draft.block(key, left, "a source: docs/run-file.md#datatrain")
    elif stage == "pt":
        found["format"] = Leaf("text", "stage: pt")
        found["text"] = Leaf(columns.get("prompt", "instruction"), f"{key}: columns.prompt")
    elif entry.get("formatting", "alpaca") == "alpaca":
        found["format"] = Leaf("alpaca_chat", "its alpaca rows go through the template")
        usual = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                 "history": "history"}  # fmt: skip
        if odd := {k: v for k, v in columns.items() if usual.get(k) != v}:
            draft.block(key, odd, "columns instruction, input, output, system and history")
    else:
        found["format"] = Leaf("sharegpt", f"{key}: formatting")
        if (column := columns.get("messages", "conversations")) != "conversations":
            found["conversations"] = Leaf(column, f"{key}: columns.messages")
        known = ("from", "role", "value", "content", "human", "user", "gpt", "assistant", "system",
                 "observation", "tool", "function_call", "function")  # fmt: skip
        if odd := {k: v for k, v in tags.items() if v not in known}:
            draft.block(key, odd, "docs/data.md#chats has the keys and roles of a turn")
    return found
