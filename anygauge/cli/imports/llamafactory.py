"""LLaMA-Factory's YAML, not that of its version 1: what `tables/llamafactory.toml` cannot say."""

from __future__ import annotations

import re
from typing import Any

from anygauge.cli.imports.draft import Draft, Leaf, targets
from anygauge.cli.imports.engine_files import find_beside, put_engine, read_mapping
from anygauge.cli.imports.trainer import put_objective, put_share, put_training
from anygauge.interface import RunFileError

FAMILIES = {
    "llama3": "llama-3.*instruct",
    **dict.fromkeys(("qwen3", "qwen3_nothink"), "qwen3-"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_nothink"), "qwen3[.]5"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_nothink"), "qwen3-vl-.*instruct"),
    "qwen": "qwen2[.]5",
    "gemma": "gemma-(2-)?[0-9]+b-it",
    "gemma3": "gemma-3-.*-it",
    "phi4": "phi-4",
    "deepseek": "deepseek-v2",
    "deepseek3": "deepseek-v3",
}
"""Its templates -> models whose own tokenizer has the template that it is like."""
OBJECTIVES = {"sigmoid": "dpo", "orpo": "orpo"}
"""Its losses of pairs -> ours."""
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
COLUMNS |= {"system": "system", "history": "history"}
TAGS = {"from", "role", "value", "content", "human", "user", "gpt", "assistant", "system"}
TAGS |= {"observation", "tool", "function_call", "function"}


def read_llamafactory(draft: Draft) -> None:
    """Read LLaMA-Factory's keys."""
    stage, kind = draft.take("stage", "sft"), draft.take("finetuning_type", "lora")
    loss = draft.take("pref_loss", "sigmoid")
    if stage == "dpo" and loss in OBJECTIVES:
        key = f"stage: dpo, pref_loss: {loss}"
        put_objective(draft, OBJECTIVES[loss], key, kind == "lora", "pref_beta")
    elif stage not in ("sft", "pt"):
        draft.block("stage", f"{stage}, pref_loss: {loss}", "stage: sft, pt or dpo; TRL for others")
    name = draft.note("model.name", draft.take("model_name_or_path"), "model_name_or_path")
    if re.search("awq|gptq|aqlm|-int4", str(name), re.IGNORECASE):
        draft.block("model_name_or_path", name, "the model that it was made from: model.quantize")
    put_engine(draft)
    # Megatron's degrees are speed, but ranks that share their rows count once in a batch.
    for degree in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"):
        draft.sharing *= draft.number(f"{degree}_size", 1)
    ranks = draft.number("ray_num_workers", draft.sharing)
    draft.devices = draft.devices or (ranks if ranks > 1 else None)
    put_training(draft, "float32")
    _put_quantized(draft)
    _put_adapter(draft, kind)
    _put_data(draft, stage)
    draft.apply("trainer", "llamafactory")


def _put_quantized(draft: Draft) -> None:
    bits, method = draft.take("quantization_bit"), draft.take("quantization_method", "bnb")
    double, form = draft.take("double_quantization", True), draft.take("quantization_type", "nf4")
    experts = draft.mapping("kt_config").get("kt_expert_weight_format", "bf16")
    if experts != "bf16":
        draft.block("kt_config", experts, "experts in 16 bits: strategy: fsdp")
    if bits is None:
        return
    if bits not in (4, 8) or method not in ("bnb", "bitsandbytes") or form != "nf4":
        draft.block("quantization_bit", f"{bits}, {method}, {form}", "model.quantize: nf4 or int8")
        return
    draft.put("model.quantize.type", "nf4" if bits == 4 else "int8", f"quantization_bit: {bits}")
    if bits == 4:
        draft.note("model.quantize.double_quantization", double, "double_quantization")


def _put_adapter(draft: Draft, kind: Any) -> None:
    rank, alpha = draft.number("lora_rank", 8), draft.number("lora_alpha")
    layers, start = draft.take("lora_target", "all"), draft.take("adapter_name_or_path")
    if draft.take("pissa_iter") is not None and draft.keys.get("pissa_init"):
        draft.change("pissa_iter: factors come from a fast SVD there, from an exact one here")
    if kind not in ("lora", "full"):
        draft.block("finetuning_type", kind, "finetuning_type: lora or full")
    elif kind == "lora" and start is not None:
        draft.note("adapter.start_from", start, "adapter_name_or_path")
    elif kind == "lora":
        draft.note("adapter.r", rank, "lora_rank")
        draft.put("adapter.alpha", alpha or 2 * rank, f"lora_alpha: {alpha or 'twice the rank'}")
        draft.put("adapter.targets", targets(layers), f"lora_target: {layers}")


def _put_data(draft: Draft, stage: Any) -> None:
    folder, most = draft.take("dataset_dir", "data"), draft.number("max_samples")
    chosen = {"train": draft.items("dataset"), "eval": draft.items("eval_dataset")}
    packed, neat = draft.take("packing", stage == "pt"), draft.take("neat_packing", False)
    prompts, history = draft.take("train_on_prompt", False), draft.take("mask_history", False)
    thinking, template = draft.take("enable_thinking"), str(draft.take("template", ""))
    table = draft.take("dataset_info")
    if any(chosen.values()) and table is None:
        if str(folder).startswith(("REMOTE:", "ONLINE")):
            draft.change(f"dataset_dir: {folder}: here the data sets are those of data/")
            folder = "data"
        path = find_beside(draft, f"{folder}/dataset_info.json")
        table, folder = read_mapping(path, f"{folder}/dataset_info.json"), path.parent
    for place, names in chosen.items():
        found = [_source(draft, name, table, str(folder), most, stage) for name in names]
        draft.put_sources(place, found)
    put_share(draft, "val_size")
    if neat or packed:
        draft.put("data.packing", "isolate" if neat else "concatenate", "packing, neat_packing")
    if stage == "pt":
        draft.change("stage: pt joins rows and cuts them at cutoff_len; here packs hold whole rows")
        return
    loss = "all" if prompts else "last_turn" if history else "answer"
    draft.put("data.loss_on", loss, f"train_on_prompt: {prompts}, mask_history: {history}".lower())
    draft.change("rows beyond cutoff_len: prompt and answer are cut there, here the end")
    if thinking is not None:
        draft.note("data.chat_template_kwargs.enable_thinking", thinking, "enable_thinking")
    family = FAMILIES.get(template, "$.")
    if re.search(family, str(draft.at("model.name")).lower()):
        text = "is written anew there; here the tokenizer's own is used"
        draft.change(f"template: {template} {text}")
        if template == "qwen3_vl":
            draft.change("template: qwen3_vl begins answers with an empty <think> there, not here")
    elif template:
        nearest = "data.chat_template: a file, or a name: docs/data.md#chats"
        draft.block("template", template, nearest)


def _source(
    draft: Draft, name: str, table: dict[str, Any], folder: str, most: Any, stage: Any
) -> dict[str, Leaf]:
    """A data set of `dataset_info.json` as a source."""
    entry, key = table.get(name), f"dataset: {name}"
    if not isinstance(entry, dict):
        has = ", ".join(list(table)[:20])
        raise RunFileError(f"{draft.file}: {key} is not in dataset_info.json, which has {has}")
    columns, chat = {**(entry.get("columns") or {})}, entry.get("formatting") == "sharegpt"
    hub, file = entry.get("hf_hub_url"), entry.get("file_name")
    if not hub and not file:
        draft.block(key, entry, "data.train.path: a file, or a data set of the hub")
    found = {"path": Leaf(hub or draft.local(f"{folder}/{file}"), key)}
    for theirs, field in (("subset", "subset"), ("split", "split"), ("num_samples", "limit")):
        if theirs in entry:
            found[field] = Leaf(entry[theirs], f"{key}: {theirs}")
    if most is not None:
        found["limit"] = Leaf(min(most, entry.get("num_samples", most)), f"max_samples: {most}")
    pairs = draft.at("objective") is not None
    media = {"images", "videos", "audios", "kto_tag"} & columns.keys()
    if media or pairs != bool(entry.get("ranking")) or (pairs and not chat):
        usable = "chats, with ranking: true" if pairs else "rows of text with answers"
        draft.block(key, "images, sound or preferences", usable)
    elif entry.keys() & {"folder", "script_url"} or (
        chat and {*entry.get("tags", {}).values()} - TAGS
    ):
        draft.block(key, entry, "a source: docs/data.md#formats")
    elif stage == "pt":
        found["format"] = Leaf("text", "stage: pt")
        found["text"] = Leaf(columns.get("prompt", "instruction"), key)
    elif pairs:
        found["format"] = Leaf("preference", f"{key}: ranking")
        columns["prompt"] = columns.pop("messages", "conversations")
        found |= {name: Leaf(column, f"{key}: columns") for name, column in columns.items()}
    elif chat:
        found["format"] = Leaf("sharegpt", f"{key}: formatting")
        found["conversations"] = Leaf(columns.get("messages", "conversations"), f"{key}: columns")
    else:
        found["format"] = Leaf("alpaca_chat", "alpaca rows go through the template there")
        if odd := {k: v for k, v in columns.items() if COLUMNS.get(k) != v}:
            draft.block(key, odd, "columns instruction, input, output, system and history")
    return found
