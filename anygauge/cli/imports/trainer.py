"""Hugging Face's TrainingArguments and TRL's SFTConfig; other tools have the former's keys too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anygauge.cli.imports.draft import (
    OFF,
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
from anygauge.interface import RunFileError

SPEED = (
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers ddp_bucket_cap_mb "
    "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context ddp_timeout "
    "ddp_backend ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph tf32 use_cache "
    "low_cpu_mem_usage torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
    "torch_empty_cache_steps gradient_checkpointing_kwargs eval_accumulation_steps liger_kernel_config "
    "activation_checkpointing_kwargs local_rank remove_unused_columns accelerator_config "
    "per_device_eval_batch_size preprocessing_num_workers dataset_num_proc enable_jit_checkpoint "
    "use_cpu bf16_full_eval fp16_full_eval include_for_metrics dataset_kwargs eval_use_gather_object"
)
LOGGING = (
    "logging_strategy logging_first_step logging_nan_inf_filter log_level log_level_replica debug "
    "log_on_each_node disable_tqdm skip_memory_metrics include_num_input_tokens_seen "
    "prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_delay plot_loss"
)
NAMING = (
    "overwrite_output_dir save_safetensors save_only_model save_on_each_node overwrite_cache "
    "ignore_data_skip restore_callback_states_from_checkpoint cache_dir label_names "
    "length_column_name"
)
UPLOAD = (
    "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision "
    "hf_hub_token trackio_space_id trackio_bucket_id trackio_static_space_id token"
)
BEST = "checkpoint.keep_best: 1 keeps that checkpoint; the result is the last step's"
TRAINER: Table = {
    **ours("train.optimizer.lr", "learning_rate", as_number),
    **ours("train.epochs", "num_train_epochs", as_number),
    **ours("train.steps", "max_steps", positive),
    **ours("train.optimizer.weight_decay", "weight_decay", as_number),
    **ours("train.max_grad_norm", "max_grad_norm", as_number),
    **ours("train.seed", "seed", as_number),
    **ours("train.log_every", "logging_steps", lambda value: max(1, int(value))),
    **ours("train.gradient_checkpointing", "gradient_checkpointing activation_checkpointing"),
    **ours("train.eval_at_start", "eval_on_start"),
    **ours("checkpoint.keep_last", "save_total_limit", positive),
    **nothing("speed", SPEED),
    **nothing("logging", LOGGING),
    **nothing("naming", NAMING),
    **nothing("upload", UPLOAD),
    **not_offered("the epoch's order comes from train.seed", "data_seed"),
    **not_offered(BEST, "load_best_model_at_end metric_for_best_model greater_is_better"),
    **not_offered("a loop of your own: examples/own_loop.py", "neftune_noise_alpha"),
    **not_offered("a loop of your own: examples/own_loop.py", "label_smoothing_factor"),
    **not_offered("train.optimizer has the settings that there are", "optim_args"),
    **not_offered("train.optimizer.name", "optim_target_modules"),
    **not_offered("`anygauge plan RUN` says what fits", "auto_find_batch_size"),
    **not_offered("the last step takes what is left of the rows", "dataloader_drop_last"),
    **not_offered("strategy: fsdp, with dp_replicate, tp and cp", "parallelism_config"),
    **not_offered("runs are equal on one machine and release already", "full_determinism"),
    **not_offered("the loss is the mean over all tokens of all devices",
                  "average_tokens_across_devices", (True,)),
    **not_offered("`anygauge train`", "do_train do_eval", (True, False)),
    **not_offered("`anygauge generate`", "do_predict predict_with_generate"),
}  # fmt: skip
"""What needs more than one key is read by the functions below."""

TRL: Table = {
    **TRAINER,
    **ours("model.name", "model_name_or_path"),
    **ours("model.revision", "model_revision"),
    **ours("model.trust_remote_code", "trust_remote_code"),
    **ours("data.train.subset", "dataset_config"),
    **ours("data.train.split", "dataset_train_split"),
    **ours("data.train.text", "dataset_text_field"),
    **ours("data.chat_template", "chat_template_path"),
    **ours("data.max_length", "max_length max_seq_length", as_number),
    **ours("data.streaming", "dataset_streaming"),
    **ours("train.activation_offloading", "activation_offloading"),
    **ours("train.router_aux_loss_coef", "router_aux_loss_coef", as_number),
    **ours("adapter.r", "lora_r", as_number),
    **ours("adapter.alpha", "lora_alpha", as_number),
    **ours("adapter.dropout", "lora_dropout", as_number),
    **ours("adapter.targets", "lora_target_modules", lambda value: targets(value)),
    **ours("adapter.target_parameters", "lora_target_parameters", lambda value: as_list(value)),
    **ours("adapter.modules_to_save", "lora_modules_to_save", lambda value: as_list(value)),
    **ours("adapter.rslora", "use_rslora"),
    **ours("adapter.dora", "use_dora"),
    **nothing("speed", "attn_implementation padding_free pad_to_multiple_of eval_packing pad_token"),
    **nothing("logging", "log_completions dataset_test_split"),
    **not_offered("a causal language model", "lora_task_type", ("CAUSAL_LM",)),
    **not_offered("model.quantize: nf4", "bnb_4bit_quant_type", ("nf4",)),
    **not_offered("data.shuffle: rows are read in a new order in each epoch", "shuffle_dataset",
                  (True, False)),
    **not_offered("the mean over loss tokens", "loss_type", ("nll", "chunked_nll")),
    **not_offered("the start of a row is kept", "truncation_mode", ("keep_start",)),
    **not_offered("the tokenizer's own end token", "eos_token"),
    **not_offered("write what it sets into the run file", "model_init_kwargs"),
}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(
        ["adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"], "adamw"
    ),
    **dict.fromkeys(["paged_adamw_32bit", "paged_adamw", "adamw_torch_npu_fused"], "adamw"),
    **dict.fromkeys(
        ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"], "adamw_8bit"
    ),
    **{"lion_32bit": "lion", "lion": "lion", "sgd": "sgd"},
}
"""Their names of optimizers -> ours."""
_OPTIMIZER = "train.optimizer.name: adamw, adamw_8bit, lion or sgd"
_SCHEDULE = "train.schedule.name: constant, linear or cosine"


def read_trainer(draft: Draft) -> None:
    """TrainingArguments, or TRL's arguments with model and data set."""
    trl = draft.tool == "TRL"
    put_engine(draft)
    put_batch(draft, "per_device_train_batch_size", 8)
    put_optimizer(draft, "optim", "adamw_torch")
    put_schedule(draft, "lr_scheduler_type", "linear")
    put_precision(draft, "bfloat16" if trl else "float32")
    put_evaluation(draft)
    put_folder(draft, "output_dir")
    put_trackers(draft)
    put_quantized(draft)
    if (name := draft.take("dataset_name")) is not None:
        draft.put("data.train.path", draft.path(name), given("dataset_name", name))
    if draft.take("use_peft") is False or (trl and not any("lora_" in key for key in draft.keys)):
        for key in [key for key in draft.keys if key.startswith(("lora_", "use_rs", "use_dora"))]:
            del draft.keys[key]
    elif trl:
        draft.default("adapter.r", 16)
    _put_packing(draft)
    _put_loss(draft)
    for key in ("model_name_or_path", "chat_template_path"):
        draft.keys[key] = draft.path(draft.keys.get(key))
    draft.apply(TRL)
    draft.needed["data.loss_on"] = (
        "there the rows' columns decide: `answer` for prompt and completion, `all` for messages or text"
    )
    draft.default("train.optimizer.lr", 2e-5 if trl else 5e-5)
    draft.default("train.epochs", 3)
    draft.default("train.gradient_checkpointing", trl)
    if draft.at("adapter") is not None:
        draft.default("adapter.alpha", 32)
    draft.default("data.max_length", 1024, "TRL")
    # Rows of prompt and completion are joined there as they are.
    draft.put("data.train.template", "{prompt}", "TRL joins prompt and completion as they are")


def put_batch(draft: Draft, size: str, usual: int) -> None:
    """Sequences of a step: theirs of one device, times accumulation, times devices."""
    micro = draft.number(size, usual)
    steps = draft.number("gradient_accumulation_steps", 1)
    ranks = draft.nodes * (draft.devices or 1) // draft.sharing
    if not (isinstance(micro, int) and isinstance(steps, int) and micro > 0 and steps > 0):
        raise RunFileError(
            f"{draft.file}: {size} {micro} and gradient_accumulation_steps {steps}: whole numbers "
            "from 1 are expected"
        )
    draft.put("train.micro_batch_size", micro, f"{size}: {micro}")
    origin = f"{size} {micro} x gradient_accumulation_steps {steps} x {ranks} device"
    draft.put("train.global_batch_size", micro * steps * ranks, origin + "s" * (ranks > 1))
    if draft.devices is None:
        draft.change(
            "train.global_batch_size is for 1 device, since the file does not say how many there "
            "were: import with --devices N if there were N"
        )
    elif draft.devices > 1:
        draft.put("launch.devices", draft.devices, "devices of a machine")
    if draft.nodes > 1:
        draft.put("launch.nodes", draft.nodes, "machines")


def put_optimizer(draft: Draft, key: str, usual: str) -> None:
    """The optimizer with its moments."""
    name = draft.take(key, usual)
    first, second = draft.number("adam_beta1"), draft.number("adam_beta2")
    eps = draft.number("adam_epsilon")
    ours_ = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if ours_ is None:
        draft.block(key, name, _OPTIMIZER)
        return
    draft.put("train.optimizer.name", ours_, given(key, name))
    if name == "paged_adamw_8bit":
        draft.put("train.optimizer.paged", True, given(key, name))
    elif name.startswith("paged"):
        draft.skip(f"{key}: {name}, whose paging moves memory", True, "speed")
    if name == "adamw_torch_8bit":
        draft.change(f"{key}: {name} is torchao's; here the 8-bit AdamW of bitsandbytes")
    if ours_ == "sgd":
        draft.put("train.optimizer.momentum", 0, f"{key}: sgd has none")
    elif first is not None or second is not None or ours_ == "lion":
        betas = [0.9 if first is None else first, 0.999 if second is None else second]
        draft.put("train.optimizer.betas", betas, "adam_beta1, adam_beta2")
    if eps is not None and ours_.startswith("adamw"):
        draft.put("train.optimizer.eps", eps, f"adam_epsilon: {eps}")


def put_schedule(draft: Draft, key: str, usual: str) -> None:
    """The schedule and its warm-up, of which `constant` has none there."""
    name, settings = draft.take(key, usual), draft.mapping("lr_scheduler_kwargs")
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if steps is not None and 0 < steps < 1:
        steps, ratio = None, steps
    ours_ = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(name, name)
    if name == "cosine_with_min_lr" and set(settings) == {"min_lr_rate"}:
        draft.put("train.schedule.final_ratio", settings.pop("min_lr_rate"), "min_lr_rate")
    if (
        ours_ not in ("constant", "linear", "cosine")
        or settings
        or (name == "cosine_with_min_lr" and draft.at("train.schedule.final_ratio") is None)
    ):
        draft.block(key, f"{name} {settings or ''}".strip(), _SCHEDULE)
        return
    draft.put("train.schedule.name", ours_, given(key, name))
    if name == "constant":
        if steps or ratio:
            draft.skip(key, "constant, which has no warm-up there", "naming")
    elif steps:
        draft.put("train.schedule.warmup_steps", int(steps), f"warmup_steps: {steps}")
    elif ratio:
        draft.put("train.schedule.warmup_ratio", ratio, f"warmup_ratio: {ratio}")


def put_precision(draft: Draft, usual: str) -> None:
    """Types of numbers."""
    bf16, half, fp8 = draft.take("bf16"), draft.take("fp16"), draft.take("fp8")
    pure, written = draft.take("pure_bf16"), draft.take_first("dtype torch_dtype")[1]
    draft.take("bnb_4bit_compute_dtype")  # that of the weights, which ours is by default
    if written in ("bfloat16", "float16") and bf16 is None and half is None:
        bf16, half = written == "bfloat16", written == "float16"
    if half and half not in OFF:
        draft.put("precision.param_dtype", "float16", given("fp16", half))
    elif bf16 == "auto":
        draft.put("precision.param_dtype", "auto", "bf16: auto")
    elif pure or (bf16 and bf16 not in OFF):
        draft.put("precision.param_dtype", "bfloat16", "pure_bf16" if pure else given("bf16", bf16))
    else:
        name = usual if bf16 is None and half is None else "float32"
        draft.put("precision.param_dtype", name, "neither bf16 nor fp16")
    if pure:
        draft.change("pure_bf16: trained weights keep a float32 copy here")
    if fp8:
        draft.put("precision.fp8", True, "fp8: true")
        draft.change("fp8: products in FP8 as the backend has them, which must have some")


def put_evaluation(draft: Draft) -> None:
    """When it evaluates and saves, which is not part of the result."""
    often = draft.take_first("eval_strategy evaluation_strategy", "no")[1]
    every, save, steps = (
        draft.take("eval_steps"),
        draft.take("save_strategy"),
        draft.take("save_steps"),
    )
    if often == "steps" and (found := _count(every)):
        draft.put("train.eval_every", found, f"eval_steps: {every}")
    elif often not in OFF or every is not None:
        draft.skip("eval_strategy", f"{often}; it evaluates at the end", "logging")
    if save in ("no", False):
        draft.put("checkpoint.every", 0, f"save_strategy: {'no' if save is False else save}")
    elif save == "best":
        draft.block("save_strategy", save, BEST)
    elif save in ("steps", None) and (found := _count(steps)):
        draft.put("checkpoint.every", found, f"save_steps: {steps}")
    elif save is not None:
        draft.skip("save_strategy", f"{save}; a checkpoint every 15 minutes", "naming")
    resume = draft.take("resume_from_checkpoint")
    if resume not in (None, False):
        draft.put("checkpoint.resume", "auto" if resume is True else resume,
                  given("resume_from_checkpoint", resume))  # fmt: skip


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def put_folder(draft: Draft, key: str) -> None:
    """The name of the run and its folder: theirs is both in one."""
    folder, name = draft.take(key), draft.take("run_name")
    if isinstance(folder, str) and (path := Path(folder)).name:
        draft.put("name", re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.name) or "run",
                  given(key, folder))  # fmt: skip
        draft.put("output", str(path.parent), given(key, folder))
    if name is not None:
        draft.skip("run_name", name, "naming")


def put_trackers(draft: Draft) -> None:
    """Where metrics go."""
    asked = as_list(draft.take("report_to", []))
    project = draft.take("project")
    known = [name for name in asked if name in ("wandb", "tensorboard", "mlflow")]
    if known:
        draft.put("trackers", known, given("report_to", asked))
    for name in asked:
        if name not in known and name != "none":
            draft.skip("report_to", name, "logging")
    if project is not None and "wandb" in known:
        draft.put("tracker_options.wandb.project", project, given("project", project))
    elif project is not None:
        draft.skip("project", project, "logging")


def put_quantized(draft: Draft) -> None:
    """A quantized base."""
    four, eight = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    double = draft.take("use_bnb_nested_quant", False)
    if four:
        draft.put("model.quantize.type", "nf4", "load_in_4bit: true")
        draft.put("model.quantize.double_quantization", bool(double), "use_bnb_nested_quant")
    elif eight:
        draft.put("model.quantize.type", "int8", "load_in_8bit: true")


def _put_packing(draft: Draft) -> None:
    packs, strategy = draft.take("packing", False), draft.take("packing_strategy", "bfd")
    if packs and strategy == "wrapped":
        draft.put("data.packing", "concatenate", "packing_strategy: wrapped")
        draft.change(
            "packing_strategy: wrapped cuts rows at max_length; here packs hold whole rows"
        )
    elif packs:
        draft.put("data.packing", True, "packing: true")
        if strategy == "bfd_split":
            draft.change(
                "packing_strategy: bfd_split splits rows beyond max_length; here they are cut"
            )


def _put_loss(draft: Draft) -> None:
    """Which tokens have a loss, for which there is no default: there the columns decide."""
    answers, completion = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    if answers or completion:
        key = "assistant_only_loss" if answers else "completion_only_loss"
        draft.put("data.loss_on", "answer", f"{key}: true")
    elif completion is False:
        draft.put("data.loss_on", "all", "completion_only_loss: false")


def as_list(value: Any) -> list[Any]:
    """A list, also where it is written as text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value)


def targets(value: Any) -> Any:
    """Layers of an adapter: `all`, names, or an expression, also in a list of one."""
    if isinstance(value, str) and re.search(r"[\\^$*|()\[\]]", value):
        return value
    names = as_list(value)
    return "all-linear" if names in (["all"], ["all-linear"]) else names
