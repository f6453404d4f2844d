"""How others spread a model: DeepSpeed's JSON, FSDP's options, and Accelerate's YAML around them."""

from __future__ import annotations

from collections.abc import Mapping
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
    shown,
)
from anygauge.config.document import read_document
from anygauge.config.tree import Problem, plain, run_file_error
from anygauge.interface import RunFileError
from anygauge.util.text import flattened

_SIZES = ["overlap_comm", "contiguous_gradients", "sub_group_size", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "reduce_scatter", "round_robin_gradients", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "use_all_reduce_for_fetch", "module_granularity_threshold", "zero_hpz_partition_size", "ignore_unused_parameters", "legacy_stage1", "pin_memory", "buffer_count", "buffer_size", "fast_init", "ratio", "max_in_cpu", "pipeline", "pipeline_read", "pipeline_write", "model_persistence_threshold", "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save"]
DEEPSPEED: Table = {
    **ours("strategy.stage", "zero_optimization.stage", as_number),
    **ours("strategy.nvme", "zero_optimization.offload_optimizer.nvme_path"),
    **ours("train.max_grad_norm", "gradient_clipping", as_number),
    **ours("strategy.options.zero_quantized_weights", "zero_optimization.zero_quantized_weights"),
    **ours(
        "strategy.options.zero_quantized_gradients", "zero_optimization.zero_quantized_gradients"
    ),
    **nothing(
        "speed",
        " ".join(
            f"zero_optimization.{part}{prefix}{name}"
            for part in ("", "offload_optimizer.", "offload_param.")
            for prefix in ("", "stage3_")
            for name in _SIZES
        )
        + " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer memory_breakdown "
        "prescale_gradients communication_data_type aio.block_size aio.queue_depth "
        "aio.single_submit aio.overlap_events aio.thread_count zero3_init_flag compile.disable "
        "compile.backend compile.deepcompile fp16.auto_cast fp16.loss_scale fp16.loss_scale_window "
        "fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale",
    ),
    **nothing(
        "logging",
        "steps_per_print wall_clock_breakdown dump_state comms_config.verbose timers.throughput."
        "enabled timers.throughput.synchronized monitor_config.enabled monitor_config.tag "
        "monitor_config.csv_monitor.enabled csv_monitor.enabled tensorboard.enabled wandb.enabled "
        "flops_profiler.enabled",
    ),
    **not_offered(
        "DeepSpeed's own optimizer and schedule: write train.optimizer and train.schedule",
        "optimizer.type optimizer.params.lr optimizer.params.betas optimizer.params.eps "
        "optimizer.params.weight_decay scheduler.type scheduler.params.warmup_min_lr "
        "scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps "
        "scheduler.params.total_num_steps",
    ),
}
"""DeepSpeed's fields, dotted. What says `auto` is left to the trainer, here as there."""

FSDP: Table = {
    **nothing(
        "speed",
        "version limit_all_gathers sync_module_states use_orig_params cpu_ram_efficient_loading "
        "auto_wrap_policy transformer_layer_cls_to_wrap backward_prefetch forward_prefetch "
        "min_num_params xla mixed_precision_policy min_num_params",
    ),
    **nothing("naming", "state_dict_type final_state_dict_type"),
    **ours("train.gradient_checkpointing", "activation_checkpointing"),
}
"""Options of FSDP, without the prefix ``fsdp_`` that some have."""

ACCELERATE: Table = {
    **nothing(
        "speed",
        "compute_environment downcast_bf16 machine_rank main_training_function main_process_ip "
        "main_process_port rdzv_backend same_network tpu_env tpu_use_cluster tpu_use_sudo use_cpu "
        "gpu_ids enable_cpu_affinity tpu_name tpu_zone commands command_file "
        "dynamo_config.dynamo_backend zero3_init_flag deepspeed_config.zero3_init_flag "
        "deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile",
    ),
    **nothing("logging", "debug"),
    **not_offered(
        "give the DeepSpeed JSON that it names as another FILE",
        "deepspeed_config.deepspeed_config_file",
    ),
}


def read_mapping(path: Path, shown_as: str) -> dict[str, Any]:
    """A YAML or JSON file with a mapping at its top.

    Raises:
        RunFileError: it is none.
    """
    problems: list[Problem] = []
    found: dict[str, Any] = plain(read_document(path, shown_as, problems))
    if problems:
        raise run_file_error(shown_as, problems)
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
        f"{draft.file.name} or above it. Run the command where the path is right, or give the file "
        f"as well: anygauge import {draft.file} PATH"
    )


def put_deepspeed(draft: Draft, values: Mapping[str, Any], name: str = "deepspeed") -> None:
    """Read DeepSpeed's configuration."""
    flat = {key: value for key, value in flattened(values) if value != "auto"}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if flat.pop(key, None) is not None:
            draft.change(f"{name}: {key} is taken from the trainer's batch size")
    steps = flat.pop("gradient_accumulation_steps", None)
    draft.keys.setdefault("gradient_accumulation_steps", steps)
    for kind in ("bf16", "fp16"):
        if flat.pop(f"{kind}.enabled", None):
            draft.keys.setdefault(kind, True)
    draft.put("strategy.name", "zero", name)
    places = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    off = [
        ours_
        for ours_, theirs in places.items()
        if flat.pop(f"zero_optimization.{theirs}.device", None) not in (*OFF, None)
    ]
    if off:
        draft.put("strategy.offload", off[0] if len(off) == 1 else "both", f"{name}: offload_*")
    draft.apply(DEEPSPEED, flat, f"{name}: ")
    draft.default("strategy.stage", 0, "DeepSpeed")


def put_fsdp(draft: Draft, options: Any, values: Mapping[str, Any], name: str = "fsdp") -> None:
    """Read FSDP's options: ``full_shard auto_wrap`` as text, list or true, and its mapping."""
    words = options.split() if isinstance(options, str) else options
    words = [] if isinstance(words, bool) else list(words or ())
    flat = {key.removeprefix("fsdp_").lower(): value for key, value in values.items()}
    reshard, sharding = flat.pop("reshard_after_forward", None), flat.pop("sharding_strategy", None)
    words += [str(word).lower() for word in (reshard, sharding) if isinstance(word, str)]
    draft.put("strategy.name", "fsdp", given(name, options) if options else f"{name}_config")
    if "offload" in words or flat.pop("offload_params", flat.pop("cpu_offload", False)):
        draft.put("strategy.offload", "both", f"{name}_config: offload_params")
    if reshard is False or "shard_grad_op" in words or "hybrid_shard_zero2" in words:
        draft.put("strategy.gather", "step", f"{name}_config: weights are gathered once a step")
    if any(word.startswith("hybrid_shard") for word in words) and draft.nodes > 1:
        draft.put("strategy.dp_replicate", draft.nodes, f"{name}: hybrid_shard")
    draft.apply(FSDP, flat, f"{name}_config: ")


def put_accelerate(draft: Draft, values: dict[str, Any], name: str) -> None:
    """Read what ``accelerate config`` wrote."""
    left = dict(values)
    kind = str(left.pop("distributed_type", "NO")).upper()
    nodes = as_number(left.pop("num_machines", 1) or 1, f"{name}: num_machines")
    ranks = as_number(left.pop("num_processes", 1) or 1, f"{name}: num_processes")
    draft.nodes, draft.devices = nodes, draft.devices or max(ranks // nodes, 1)
    mixed = left.pop("mixed_precision", "no")
    if mixed in ("bf16", "fp16"):
        draft.keys.setdefault(mixed, True)
    elif mixed == "fp8":
        draft.keys.setdefault("fp8", True)
    fsdp, zero = left.pop("fsdp_config", None) or {}, left.pop("deepspeed_config", None) or {}
    if kind == "FSDP":
        put_fsdp(draft, None, fsdp, f"{name}: fsdp")
    elif kind == "DEEPSPEED" and not zero.get("deepspeed_config_file"):
        made = {
            "zero_optimization": {
                "stage": zero.pop("zero_stage", 2),
                "offload_optimizer": {"device": zero.pop("offload_optimizer_device", "none")},
                "offload_param": {"device": zero.pop("offload_param_device", "none")},
                "stage3_gather_16bit_weights_on_model_save": zero.pop(
                    "zero3_save_16bit_model", None
                ),
            },
            **{
                k: zero.pop(k, "auto") for k in ("gradient_clipping", "gradient_accumulation_steps")
            },
        }
        put_deepspeed(draft, made, f"{name}: deepspeed_config")
    elif kind not in ("NO", "DEEPSPEED") and not kind.startswith("MULTI_"):
        draft.block(f"{name}: distributed_type", kind, "strategy: fsdp, ddp or zero")
    left |= {f"deepspeed_config.{key}": value for key, value in zero.items()}
    draft.apply(ACCELERATE, dict(flattened(left)), f"{name}: ")


def put_engine(draft: Draft) -> None:
    """Read the keys `deepspeed`, `fsdp` and `fsdp_config`, and the files that they name."""
    zero = draft.take("deepspeed")
    options, values = draft.take("fsdp"), draft.take("fsdp_config", {})
    if isinstance(zero, str):
        if draft.at("strategy.name") != "zero":  # it was given as a file of its own
            put_deepspeed(draft, read_mapping(find_beside(draft, zero), zero), Path(zero).name)
    elif isinstance(zero, dict):
        put_deepspeed(draft, zero)
    elif zero is not None:
        raise RunFileError(f"{draft.named('deepspeed')}: got {shown(zero)}, expected a file")
    if isinstance(values, str):
        values = read_mapping(find_beside(draft, values), values)
    if (options or values) and zero is None:
        put_fsdp(draft, options, values)
