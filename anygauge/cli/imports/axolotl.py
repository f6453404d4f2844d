"""Axolotl's YAML, as of its commit 067b021 (24 July 2026)."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
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
    positive,
    shown,
)
from anygauge.cli.imports.engine_files import put_engine
from anygauge.cli.imports.trainer import (
    as_list,
    put_batch,
    put_evaluation,
    put_folder,
    put_optimizer,
    put_precision,
    put_schedule,
    targets,
)
from anygauge.interface import RunFileError

_IMAGES = "Axolotl itself, for images and sound; rows of text train here, by their own file"
_TRL = "TRL, which trains on with an adapter from here"
_LOOP = "a loop of your own: examples/own_loop.py"
_ADAPTER = "adapter.init, with pissa or olora"
TABLE: Table = {
    **ours("model.revision", "revision_of_model"),
    **ours("model.trust_remote_code", "trust_remote_code"),
    **ours("data.max_length", "sequence_len", as_number),
    **ours("data.group_by_length", "group_by_length"),
    **ours("data.shuffle", "curriculum_sampling", lambda value: not value),
    **ours("data.streaming", "streaming"),
    **ours("data.shuffle_buffer", "streaming_multipack_buffer_size", as_number),
    **ours("train.optimizer.lr", "learning_rate", as_number),
    **ours("train.optimizer.weight_decay", "weight_decay", as_number),
    **ours("train.optimizer.loraplus_lr_ratio", "loraplus_lr_ratio", as_number),
    **ours("train.epochs", "num_epochs", as_number),
    **ours("train.steps", "max_steps", positive),
    **ours("train.max_grad_norm", "max_grad_norm", as_number),
    **ours("train.seed", "seed", as_number),
    **ours("train.log_every", "logging_steps", lambda value: max(1, int(value))),
    **ours("train.activation_offloading", "activation_offloading", bool),
    **ours("train.trainable", "unfrozen_parameters", lambda value: [_whole(one) for one in value]),
    **ours("train.schedule.final_ratio", "cosine_min_lr_ratio", as_number),
    **ours("adapter.r", "lora_r", as_number),
    **ours("adapter.alpha", "lora_alpha", as_number),
    **ours("adapter.dropout", "lora_dropout", as_number),
    **ours("adapter.rslora", "peft_use_rslora"),
    **ours("adapter.dora", "peft_use_dora"),
    **ours("adapter.target_parameters", "lora_target_parameters", as_list),
    **ours("adapter.modules_to_save", "lora_modules_to_save", as_list),
    **ours("adapter.init", "peft_init_lora_weights"),
    **ours("adapter.start_from", "lora_model_dir"),
    **ours("checkpoint.resume", "auto_resume_from_checkpoints", lambda value: "auto" if value else None),
    **ours("checkpoint.keep_last", "save_total_limit", positive),
    **nothing(
        "speed",
        "tf32 flash_attention xformers_attention sdp_attention sdpa_attention flex_attention "
        "eager_attention s2_attention flex_attn_compile_kwargs attn_implementation flash_optimum "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv "
        "fused_attn_kernel gemma4_hybrid_attn_impl cut_cross_entropy chunked_cross_entropy tiled_mlp "
        "unsloth_cross_entropy_loss lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel liger_rope liger_rms_norm liger_layer_norm liger_swiglu "
        "liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy "
        "liger_rms_norm_gated use_kernels use_scattermoe use_sonicmoe experts_implementation "
        "use_dsv4_kernels use_glm_dsa_kernels expert_parallel_size expert_parallel_num_nvl_bytes "
        "expert_parallel_token_capacity fp8_enable_fsdp_float8_all_gather torch_compile torch_compile_backend torch_compile_mode "
        "gradient_checkpointing_kwargs eval_sample_packing eval_batch_size pad_to_sequence_len "
        "sample_packing_group_size sample_packing_bin_size dataloader_num_workers "
        "dataloader_pin_memory dataloader_prefetch_factor dataset_processes dataset_num_proc "
        "dataset_keep_in_memory ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_find_unused_parameters fsdp_version device_map low_cpu_mem_usage lora_on_cpu max_memory "
        "gpu_memory_limit qlora_sharded_model_loading accelerator_config use_ray "
        "resize_token_embeddings_to_32x experimental_skip_move_to_device heads_k_stride ring_attn_func "
        "remove_unused_columns reinit_weights_device dion_rank_fraction pretrain_multipack_buffer_size",
    ),
    **nothing(
        "logging",
        "evals_per_epoch saves_per_epoch debug log_with use_wandb wandb_entity wandb_run_id wandb_watch wandb_log_model "
        "wandb_mode use_mlflow hf_mlflow_log_artifacts use_comet comet_api_key use_swanlab "
        "swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace "
        "swanlab_log_model swanlab_log_completions swanlab_completion_log_interval "
        "swanlab_completion_max_buffer eval_table_size eval_max_new_tokens eval_causal_lm_metrics "
        "do_causal_lm_eval include_tokens_per_second profiler_steps gc_steps",
    ),
    **nothing("telemetry", "use_otel_metrics otel_metrics_host otel_metrics_port"),
    **nothing(
        "naming",
        "dataset_prepared_path save_only_model save_safetensors base_model_config "
        "save_first_step strict wandb_name hf_use_auth_token",
    ),
    **nothing("upload", "hub_model_id hub_strategy push_dataset_to_hub hub_revision"),
    **not_offered("the rows of a data set as they are", "skip_prepare_dataset"),
    **not_offered("data.packing: Axolotl refuses this key itself", "max_packed_sequence_len"),
    **not_offered("the shape of rows in memory", "shuffle_merged_datasets", (True, False)),
    **not_offered("a causal language model of transformers",
                  "model_type", ("AutoModelForCausalLM",)),
    **not_offered("the tokenizer as the hub has it, by the transformers library",
                  "tokenizer_legacy added_tokens_overrides"),
    **not_offered("data.max_length: shorter rows are not left out", "min_sample_len"),
    **not_offered("prepare the rows before the run", "dataset_exact_deduplication shuffle_before_merging_datasets"),
    **not_offered("data.shuffle: false, without packing", "sample_packing_sequentially"),
    **not_offered(_IMAGES, "processor_type freeze_mm_modules image_size image_resize_algorithm is_multimodal"),
    **not_offered(_TRL, "rl rl_beta dpo_beta orpo_alpha kto_desirable_weight kto_undesirable_weight trl vllm "
                  "ebft dpo_use_weighting dpo_label_smoothing reward_model process_reward_model "
                  "center_rewards_coefficient num_labels max_prompt_len"),
    **not_offered("train it unquantized, then LLM Compressor or llama.cpp", "qat llmcompressor"),
    **not_offered("the model that it was made from, with model.quantize: nf4",
                  "gptq gptq_disable_exllama use_onebitllms nvfp4_merge_aware dsv4_fp4_grouped_mode"),
    **not_offered("strategy: fsdp, which shards experts in 16 bits", "quantize_moe_experts llama4_linearized_experts"),
    **not_offered(_LOOP, "use_eaft eaft_alpha eaft_k use_dft neftune_noise_alpha noisy_embedding_alpha "
                  "label_smoothing_factor diffusion"),
    **not_offered(_LOOP, "lisa_n_layers lisa_step_interval lisa_layers_attribute"),
    **not_offered("adapter: LoRA", "relora relora_prune_ratio relora_cpu_offload relora_steps "
                  "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps"),
    **not_offered(_ADAPTER, "peft"),
    **not_offered("adapter.targets: one expression over whole names",
                  "peft_layers_to_transform peft_layers_pattern lora_target_modules_pattern"),
    **not_offered("adapter.groups", "lora_rank_pattern lora_alpha_pattern lr_groups"),
    **not_offered("checkpoint.keep_best: 1 with train.eval_every, and end the run with Ctrl-C",
                  "early_stopping_patience"),
    **not_offered("train.schedule", "lr_quadratic_warmup cosine_constant_lr_ratio"),
    **not_offered("train.optimizer.lr: one for all weights", "embedding_lr embedding_lr_scale"),
    **not_offered("train.optimizer has the settings that there are", "optim_args optim_target_modules"),
    **not_offered("model.config, for random weights", "reinit_weights"),
    **not_offered("the model's own configuration", "overrides_of_model_config overrides_of_model_kwargs cls_model_config"),
}  # fmt: skip

TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "gemma": "gemma", "qwen3": "qwen3",
             "mistral_v1": "mistral", "phi_4": "phi"}  # fmt: skip
"""Its chat templates that are ours, to the letter."""
FAMILIES = {
    "gemma3": "gemma-3-.*-it",
    "gemma3n": "gemma-3n-.*-it",
    "gemma4": "gemma-4-.*-it",
    "gemma4_unified": "gemma-4-.*-it",
    "qwen_25": "qwen2[.]5-",
    "qwen3_5": "qwen3[.]5-",
    "llama4": "llama-4-.*-instruct",
    "falcon_h1": "falcon-h1-.*-instruct",
    "phi_3": "phi-3.*-instruct",
    "phi_35": "phi-3[.]5-.*-instruct",
    "jamba": "jamba-",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-(v3|r1)",
    "exaone": "exaone-3",
    "exaone4": "exaone-4",
    "command_a": "command-a",
}
"""Its other templates -> models whose own tokenizer has the template that it is a copy of."""
ENDS = (
    ("llama-?2|llama-(7|13|30|65)b|open_llama|codellama|tinyllama|mistral|mixtral", "<s>", "</s>"),
    ("falcon-7b|mpt-|redpajama-incite|pythia|gpt-neox", "<|endoftext|>", "<|endoftext|>"),
    ("llama-3.*instruct", "<|begin_of_text|>", "<|eot_id|>"),
    ("llama-3", "<|begin_of_text|>", "<|end_of_text|>"),
)
"""Models -> the start and end tokens that their tokenizers have."""
QUANTIZED = re.compile(
    r"gptq|awq|aqlm|bnb-|-nvfp4|prequantized|-4bit|-int4|mxfp4|-fp8", re.IGNORECASE
)
"""Names of models that are stored quantized, in ways that do not train here."""
_PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "ExpertParallelPlugin",
            "SwanLabPlugin")  # fmt: skip
_SOURCE = {
    "field_thinking": "keys of a turn that a template reads are kept",
    "template_thinking_key": "the same",
    "ds_type": "a file's suffix says it",
    "trust_remote_code": "the hub's data sets run no code",
    "preprocess_shards": "rows are tokenized in parts",
}


UNREAD = (
    "test_value full_finetune base_model_ignore_patterns eta_min adam_eps context_parapllel_size"
).split()
"""Keys in Axolotl's own examples that Axolotl does not read."""


def read_axolotl(draft: Draft) -> None:
    """Read Axolotl's keys."""
    for key in UNREAD:
        if (unread := draft.take(key)) is not None:
            draft.change(f"{given(key, unread)}: Axolotl does not read this key, and import neither")
    name = draft.take("base_model")
    draft.put("model.name", draft.path(name), given("base_model", name))
    if isinstance(name, str) and QUANTIZED.search(name):
        draft.block("base_model", name, "the model that it was made from, with model.quantize")
    put_engine(draft)
    _put_ranks(draft)
    if draft.keys.get("gradient_accumulation_steps") is None and (
        whole := draft.number("batch_size")
    ):
        micro = draft.keys.get("micro_batch_size") or 1
        draft.keys["gradient_accumulation_steps"] = max(1, int(whole) // int(micro))
    draft.take("batch_size")
    put_batch(draft, "micro_batch_size", 1)
    put_optimizer(draft, "optimizer", "adamw_torch_fused")
    if draft.keys.get("warmup_steps") is None and draft.keys.get("warmup_ratio") is None:
        draft.keys["warmup_ratio"] = 0.03
        draft.change("warm-up: 3% of the steps, Axolotl's default; there at most 100 steps")
    put_schedule(draft, "lr_scheduler", "cosine")
    for ours_, theirs in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.take(theirs) and not draft.keys.get(ours_):
            draft.keys[ours_] = True
    put_precision(draft, "float32")
    if draft.keys.get("evals_per_epoch") == 0:
        del draft.keys["evals_per_epoch"]
    put_evaluation(draft)
    put_folder(draft, "output_dir")
    _put_adapter(draft)
    _put_vocabulary(draft)
    _put_data(draft)
    _put_rest(draft)
    draft.apply(TABLE)
    draft.default("data.max_length", 512)
    draft.default("train.gradient_checkpointing", False)
    draft.default("train.seed", 42)


def _put_ranks(draft: Draft) -> None:
    """Degrees in which a model is spread, and the ranks that they make."""
    ranks = copies = 1
    for key, field in (("dp_replicate_size", "dp_replicate"), ("dp_shard_size", "dp_shard"),
                       ("tensor_parallel_size", "tp"), ("context_parallel_size", "cp")):  # fmt: skip
        if (size := draft.number(key)) is not None and size > 1:
            draft.default("strategy.name", "fsdp", given(key, size) + ";")
            draft.put(f"strategy.{field}", size, given(key, size))
            ranks, copies = ranks * size, copies * (size if field.startswith("dp_") else 1)
    if draft.devices is None and (workers := draft.number("ray_num_workers")):
        ranks = copies = workers
    draft.take("ray_num_workers")
    if ranks > 1 and draft.devices is None:
        draft.devices = ranks // draft.nodes
    if ranks != copies and draft.devices is not None:
        # Ranks that share their rows count once.
        draft.sharing = ranks // copies


def _put_adapter(draft: Draft) -> None:
    kind, four, eight = (
        draft.take("adapter"),
        draft.take("load_in_4bit"),
        draft.take("load_in_8bit"),
    )
    double = draft.mapping("bnb_config_kwargs")
    linear, names = draft.take("lora_target_linear"), draft.take("lora_target_modules", [])
    draft.take("lora_fan_in_fan_out")  # which peft finds out by itself
    if kind == "qlora" and four is None and not eight:
        four = True
    if four:
        draft.put("model.quantize.type", "nf4", "load_in_4bit: true")
        draft.put("model.quantize.double_quantization",
                  double.pop("bnb_4bit_use_double_quant", True), "Axolotl's default")  # fmt: skip
    elif eight and kind:
        draft.put("model.quantize.type", "int8", "load_in_8bit: true")
    if double:
        draft.block("bnb_config_kwargs", double, "model.quantize")
    if not kind:
        for key in [key for key in draft.keys if key.startswith(("lora_", "peft_", "loraplus"))]:
            if "kernel" not in key:
                draft.skip(key, draft.take(key), "naming")
        return
    if kind not in ("lora", "qlora"):
        draft.block("adapter", kind, "adapter: LoRA")
        return
    if draft.keys.get("lora_model_dir"):
        draft.keys["lora_model_dir"] = draft.path(draft.keys["lora_model_dir"])
        for key in ("lora_r", "lora_alpha", "peft_use_rslora", "peft_use_dora"):
            draft.take(key)
    elif linear:
        both = ["all-linear", *as_list(names)] if names else "all-linear"
        draft.put("adapter.targets", both, "lora_target_linear: true")
    elif names:
        draft.put("adapter.targets", targets(names), "lora_target_modules")
    elif draft.keys.get("lora_target_parameters"):
        draft.put("adapter.targets", [], "no lora_target_modules")
    draft.keys.setdefault("lora_r", 8)
    draft.keys.setdefault("lora_alpha", 16)


def _put_vocabulary(draft: Draft) -> None:
    """Tokens that are added, and special ones that are given other names."""
    special, tokens = draft.mapping("special_tokens"), draft.take("tokens", [])
    if isinstance(tokens, dict):
        special, tokens = tokens | special, []
    if tokens:
        draft.put("model.new_tokens", as_list(tokens), given("tokens", tokens))
    model = str(draft.at("model.name")).lower()
    own = next((ends for family, *ends in ENDS if re.search(family, model)), ["", ""])
    for kind, token in special.items():
        known = {"bos_token": own[0], "eos_token": own[1]}
        if kind in ("pad_token", "unk_token") or known.get(kind) == token:
            draft.skip(f"special_tokens.{kind}", token, "naming")
        elif kind == "eos_token" and _are_chats(draft):
            draft.change(f"special_tokens.{kind}: {token}: here the chat template ends a turn")
        else:
            draft.block(f"special_tokens.{kind}", token, "the tokenizer's own; a copy of its folder "
                        "with another, in model.tokenizer")  # fmt: skip
    draft.take("eot_tokens")  # ours ends a turn as the template does
    for key in ("tokenizer_type", "tokenizer_use_fast"):
        draft.take(key)
    if (other := draft.take("tokenizer_config")) is not None:
        draft.put("model.tokenizer", draft.path(other), given("tokenizer_config", other))


def _are_chats(draft: Draft) -> bool:
    kinds = [
        str(one.get("type")) for one in draft.keys.get("datasets") or [] if isinstance(one, dict)
    ]
    return bool(kinds) and all(kind.startswith("chat_template") for kind in kinds)


def _put_data(draft: Draft) -> None:
    sources, evaluated = draft.take("datasets", []), draft.take("test_datasets", [])
    streamed = draft.take("pretraining_dataset", [])
    inputs, named = draft.take("train_on_inputs", False), draft.take("chat_template")
    jinja = draft.take("chat_template_jinja")
    if streamed:
        for one in streamed if isinstance(streamed, list) else [streamed]:
            whole = {"path": one} if isinstance(one, str) else dict(one)
            text = whole.pop("text_column", "text")
            sources = [*sources, {"field": text, **whole, "type": "completion"}]
        draft.put("data.streaming", True, "pretraining_dataset")
        draft.keys.setdefault("sample_packing", True)
        draft.take("pretrain_multipack_attn")
        draft.take("streaming")
    templates: list[Any] = []
    for place, ones in (("train", sources), ("eval", evaluated)):
        found = [_source(draft, one, f"{place}[{at}]", templates) for at, one in enumerate(ones)]
        if found:
            draft.put(f"data.{place}", found[0] if len(found) == 1 else found, "")
    given_ = [
        jinja if one == "jinja" or (one is None and jinja) else one or named for one in templates
    ]
    if len(set(map(str, given_))) > 1:
        draft.block("datasets: chat_template", given_, "data.chat_template: one for all")
    elif given_:
        _put_template(draft, given_[0])
    if _has_answers(draft):
        draft.put("data.loss_on", "all" if inputs else "answer", given("train_on_inputs", inputs))
    share = draft.number("val_set_size", 0)
    if share >= 1:
        draft.block("val_set_size", share, "data.eval_fraction: a share of the rows")
    elif share:
        draft.put("data.eval_fraction", share, given("val_set_size", share))
    if draft.take("sample_packing"):
        draft.put("data.packing", True, "sample_packing: true")
    # Text is cut into pieces there, too, and none of it is left out.
    long = draft.take("excess_length_strategy", "drop")
    if long not in ("drop", "truncate"):
        draft.block("excess_length_strategy", long, "data.too_long: drop, and `anygauge data`")
    draft.put(
        "data.too_long", "truncate" if long == "truncate" else "drop", f"excess_length: {long}"
    )


def _has_answers(draft: Draft) -> bool:
    sources = draft.tree.get("data", {}).get("train") or []
    sources = sources if isinstance(sources, list) else [sources]
    return any(one["format"].value != "text" for one in sources)


def _put_template(draft: Draft, name: Any) -> None:
    """A chat template: ours, Axolotl's file where it is on this machine, or the tokenizer's own."""
    model = str(draft.at("model.name")).lower().rpartition("/")[2]
    key = given("chat_template", name)
    if name in (None, "tokenizer_default") or name in TEMPLATES:
        draft.put("data.chat_template", TEMPLATES.get(name), key)
    elif isinstance(name, str) and (name.endswith(".jinja") or "{" in name):
        draft.put("data.chat_template", name if "{" in name else draft.path(name), key)
    elif (file := _file_of(draft, str(name))) is not None:
        draft.put("data.chat_template", draft.local(str(file)), key)
    elif name in FAMILIES and re.search(FAMILIES[name], model):
        draft.change(f"{key} is Axolotl's copy; here the tokenizer's own is used")
    else:
        draft.block(
            "chat_template",
            name,
            f"data.chat_template: Axolotl's chat_templates/templates/{name}.jinja; where Axolotl is "
            "installed, or above this file, import finds it",
        )


def _file_of(draft: Draft, name: str) -> Path | None:
    """The file of a template, in the tree that the imported file is in or where Axolotl is
    installed."""
    place = f"axolotl/utils/chat_templates/templates/{name}.jinja"
    installed = find_spec("axolotl")
    homes = [Path(folder).parent for folder in (installed and installed.submodule_search_locations) or ()]
    homes += [folder / "src" for folder in draft.file.absolute().parents]
    return next((home / place for home in homes if (home / place).is_file()), None)


def _source(draft: Draft, one: Any, place: str, templates: list[Any]) -> dict[str, Leaf]:
    """One entry of `datasets` as a source."""
    if not isinstance(one, dict) or not one.get("path"):
        raise RunFileError(f"{draft.file}: datasets, {place}: got {shown(one)}, expected a 'path'")
    left = {key: value for key, value in one.items() if value not in (None, "", [], {})}
    found: dict[str, Leaf] = {}

    def put(field: str, value: Any, key: str) -> None:
        found[field] = Leaf(value, key)

    name, files = left.pop("path"), left.pop("data_files", None)
    kind = left.pop("type", "completion" if "field" in left else None)
    if files is not None:
        files = files if isinstance(files, list) else [files]
        name = f"hf://datasets/{name}/{files[0]}" if len(files) == 1 else name
        if len(files) > 1:
            draft.block(f"datasets.{place}.data_files", files, "one source for each file")
    put("path", draft.path(name), given("path", one["path"]))
    for theirs, field in (("name", "subset"), ("split", "split"), ("revision", "revision"),
                          ("field_tools", "tools"), ("field_system", "system")):  # fmt: skip
        if theirs in left:
            put(field, value := left.pop(theirs), given(theirs, value))
    if isinstance(kind, str) and kind.split(".")[0] == "chat_template" and kind.count(".") < 2:
        templates.append(left.pop("chat_template", None) or left.pop("chat_template_jinja", None))
        _turns(draft, left, put, given("type", kind), place)
    elif kind in ("completion", "pretrain"):
        put("format", "text", given("type", kind))
        if (column := left.pop("field", "text")) != "text":
            put("text", column, given("field", column))
    elif kind == "alpaca":
        put("format", "alpaca", "type: alpaca")
    elif kind is None:
        put("format", "tokens", "no type: rows of tokens")
    elif not _own_prompts(kind, put):
        put("format", "auto", given("type", kind))
        draft.block(f"datasets.{place}.type", kind, "alpaca, chat_template or completion")
    for key, value in left.items():
        if key not in _SOURCE and value is not False:
            draft.block(f"datasets.{place}.{key}", value, "a source: docs/run-file.md#datatrain")
    return found


def _turns(draft: Draft, left: dict[str, Any], put: Any, key: str, place: str) -> None:
    """Chats: the names of their columns and keys."""
    names = dict(left.pop("message_property_mappings", {}))
    names.setdefault("role", left.pop("message_field_role", "role"))
    names.setdefault("content", left.pop("message_field_content", "content"))
    column, roles = left.pop("field_messages", "messages"), left.pop("roles", {})
    usual = {"user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "system": {"system"},
             "tool": {"tool", "observation"}}  # fmt: skip
    if left.pop("roles_to_train", ["assistant"]) != ["assistant"]:
        draft.block(f"datasets.{place}.roles_to_train", "others", "data.loss_on: answer or all")
    for each in ("train_on_eos", "train_on_eot"):
        if (trained := left.pop(each, "turn")) != "turn":
            draft.block(f"datasets.{place}.{each}", trained, "the end of each answer has a loss")
    if any(not set(theirs) <= usual.get(role, set()) for role, theirs in roles.items()):
        draft.block(f"datasets.{place}.roles", roles, "docs/data.md#chats has the roles")
    pair = (names.pop("role"), names.pop("content"))
    if names or pair not in (("role", "content"), ("from", "value")):
        draft.block(f"datasets.{place}.message_property_mappings", {"role": pair[0], **names},
                    "docs/data.md#chats has the keys of a turn")  # fmt: skip
    # ShareGPT's format also takes turns with role and content, whatever their roles are called.
    sharegpt = pair == ("from", "value") or column in ("conversations", "conversation")
    put("format", "sharegpt" if sharegpt else "messages", key)
    if column != ("conversations" if sharegpt else "messages"):
        put("conversations" if sharegpt else "messages", column, given("field_messages", column))


def _own_prompts(kind: Any, put: Any) -> bool:
    """A type that the file describes: a prompt of one column, with text around it."""
    if not isinstance(kind, dict) or not set(kind) <= {"field_instruction", "field_output", "format",
                                                       "no_input_format", "system_prompt"}:  # fmt: skip
        return False
    text = kind.get("no_input_format") or kind.get("format") or ""
    if text.count("{instruction}") != 1 or "{input}" in text or kind.get("system_prompt"):
        return False
    put("format", "prompt_completion", "type: its own")
    put("prompt", kind.get("field_instruction", "instruction"), "field_instruction")
    put("completion", kind.get("field_output", "output"), "field_output")
    put("template", text.replace("{instruction}", "{prompt}"), "format")
    return True


def _put_rest(draft: Draft) -> None:
    """Keys whose value decides whether they mean something."""
    for plugin in as_list(draft.take("plugins", [])):
        if str(plugin).rpartition(".")[2] in _PLUGINS:
            draft.skip("plugins", plugin, "logging" if "swanlab" in str(plugin) else "speed")
        else:
            draft.block("plugins", plugin, _LOOP)
    kept = draft.take("gradient_checkpointing", False)
    draft.put("train.gradient_checkpointing", bool(kept), given("gradient_checkpointing", kept))
    if isinstance(kept, str):
        draft.put("train.activation_offloading", True, given("gradient_checkpointing", kept))
    if draft.take("tokenizer_use_mistral_common"):
        draft.change(
            "tokenizer_use_mistral_common: here the transformers library reads the same vocabulary, "
            "and its chat template writes the chats"
        )
    if draft.at("adapter") is not None and (unfrozen := draft.take("unfrozen_parameters")):
        draft.block("unfrozen_parameters", unfrozen, "beside an adapter: adapter.modules_to_save")
    if (kind := draft.take("model_type")) and not str(kind).endswith(
        ("ForCausalLM", "LMHeadModel")
    ):
        draft.block("model_type", kind, "a causal language model of transformers")
    if watch := draft.take("loss_watchdog_threshold"):
        draft.change(f"loss_watchdog_threshold: {watch}: a run that diverges ends there; here one "
                     "whose loss is not finite")  # fmt: skip
    draft.take("loss_watchdog_patience")
    settings = draft.mapping("model_config") or draft.mapping("overrides_of_model_config")
    if settings == {"output_router_logits": True}:
        draft.put("train.router_aux_loss_coef", 0.001, "model_config: output_router_logits")
        draft.change("output_router_logits: the weight is the model's router_aux_loss_coef there; "
                     "0.001 here")  # fmt: skip
    elif settings:
        draft.block("model_config", settings, "the model's own configuration")
    method, options = (
        draft.take("model_quantization_config"),
        draft.mapping("model_quantization_config_kwargs"),
    )
    if method is not None and not options.get("dequantize"):
        draft.block("model_quantization_config", method, "model.quantize")
    project, board = draft.take("wandb_project"), draft.take("use_tensorboard")
    if project is not None and draft.take("use_wandb", True):
        draft.put("tracker_options.wandb.project", project, given("wandb_project", project))
    trackers = ["wandb"] * (draft.at("tracker_options") is not None) + ["tensorboard"] * bool(board)
    if trackers:
        draft.put("trackers", trackers, "wandb_project, use_tensorboard")


def _whole(pattern: Any) -> str:
    """An expression that begins a name, there, as one for the whole name."""
    if re.search(r"\[\d*:?\d*\]$", str(pattern)):
        raise ValueError("a range of rows")
    return str(pattern) if str(pattern).endswith("$") else f"(?:{pattern}).*"
