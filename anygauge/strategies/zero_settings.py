"""DeepSpeed's configuration for a run, field by field, each with its reason.

The defaults are made for a frozen base with low-rank factors: the factors stay resident, and a
frozen weight that gradient checkpointing gathers for recomputation is kept until its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import HOST_DEVICE, Setting, Workload
from anygauge.strategies.common import trained_parameters
from anygauge.strategies.materialise import decoder_layers
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.strategies.zero_spec import check_stage_types
from anygauge.strategies.zero_versions import ENGINE

DEFAULT_PERSISTENCE = 100_000
DEFAULT_LIVE = 1_000_000_000
PREFETCH = 500_000_000
DEFAULT_PREFETCH = 50_000_000
DEFAULT_BUCKET = 500_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What the settings depend on, in elements.

    Attributes:
        trained: of all trained tensors.
        largest_factor: of an adapter's trained factors; 0 without an adapter.
        largest_block: parameters of the largest decoder layer.
    """

    trained: int
    largest_factor: int
    largest_block: int

    @classmethod
    def of(cls, adapted: nn.Module) -> ModelSizes:
        """Measure an adapted model, real or on the meta device."""
        trained = [p.numel() for _, p in trained_parameters(adapted)]
        # peft's names; other weights may be trained too, far too large to stay resident.
        factors = [p.numel() for name, p in trained_parameters(adapted) if ".lora_" in name]
        blocks = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(adapted)]
        return cls(
            trained=sum(trained),
            largest_factor=max(factors, default=0),
            largest_block=max(blocks, default=0),
        )


def zero_settings(
    options: ZeroOptions, workload: Workload, sizes: ModelSizes | None
) -> list[Setting]:
    """DeepSpeed's fields as settings, named by dotted path; later ones win over earlier ones.

    Args:
        sizes: None before the model is known: fields that depend on it are left out.

    Raises:
        UnsupportedError: DeepSpeed has no such combination of stage and types.
    """
    stage, precision = options.stage, workload.precision
    source = "DeepSpeed configuration reference"
    found: list[Setting] = []

    def add(name: str, value: Any, reason: str, source: str = source) -> None:
        found.append(Setting(name=name, value=value, reason=reason, source=source))

    add("train_micro_batch_size_per_gpu", workload.micro_batch, "train.micro_batch_size")
    add("gradient_accumulation_steps", 1, "anygauge marks the boundaries itself")
    add("gradient_clipping", workload.max_norm, "train.max_grad_norm")
    add("steps_per_print", 2**31 - 1, "anygauge reports steps itself")
    add("zero_allow_untested_optimizer", True, "anygauge brings the optimizer")
    if precision.param_dtype == "bfloat16":
        add("bf16.enabled", True, "precision.param_dtype")
    elif precision.param_dtype == "float16":
        add("fp16.enabled", True, "precision.param_dtype; the loss is scaled dynamically")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    check_stage_types(stage, precision)
    add("data_types.grad_accum_dtype", short[precision.reduce_dtype], "precision.reduce_dtype")
    if stage > 0:
        add("communication_data_type", short[precision.reduce_dtype], "precision.reduce_dtype")
    add("zero_optimization.stage", stage, "strategy.stage")
    if stage > 0 and sizes is not None and 0 < sizes.trained < DEFAULT_BUCKET:
        add(
            "zero_optimization.reduce_bucket_size",
            sizes.trained,
            f"DeepSpeed allocates a whole bucket, {DEFAULT_BUCKET:,} elements by default; all "
            "gradients fit in this one",
            "DeepSpeed's stage3.py and stage_1_and_2.py",
        )
    all_recompute = workload.activations.every == 1
    if stage == 3:
        add(
            "zero_optimization.stage3_prefetch_bucket_size",
            PREFETCH,
            "large enough to fetch the next weight of a 70B model whole",
            "MLPerf v4.0 LLM fine-tuning, a submission with ZeRO-3",
        )
        add(
            "zero_optimization.memory_efficient_linear",
            not all_recompute,
            "layers are recomputed, so torch's own linear keeps one layer's weights, not all"
            if all_recompute
            else "torch's own linear would keep every gathered weight until its backward",
            "DeepSpeed's LinearFunctionForZeroStage3",
        )
        if sizes is not None:
            _add_lora_settings(add, sizes)
    pinned = workload.backend.device_type != HOST_DEVICE
    for place, field in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if options.offload in (place, "both"):
            where = HOST_DEVICE if options.nvme is None else "nvme"
            add(f"zero_optimization.{field}.device", where, "strategy.offload")
            add(
                f"zero_optimization.{field}.pin_memory",
                pinned,
                "the host need not wait for copies to the device",
            )
    if options.nvme is not None:
        path = "zero_optimization.offload_optimizer.nvme_path"
        add(path, options.nvme, "strategy.nvme; each rank has a folder in it while it trains")
    if options.offload in ("optimizer", "both"):
        add("zero_force_ds_cpu_optimizer", False, "anygauge brings the optimizer, offloaded or not")
    for setting in workload.backend.engine_settings(ENGINE):
        if setting.name != "accelerator":
            found.append(setting)
    for name, value in options.options.items():
        add(f"zero_optimization.{name}", value, "strategy.options", "run file")
    return found


def _add_lora_settings(add: Any, sizes: ModelSizes) -> None:
    threshold = max(DEFAULT_PERSISTENCE, sizes.largest_factor)
    add(
        "zero_optimization.stage3_param_persistence_threshold",
        threshold,
        f"the largest trained factor has {sizes.largest_factor:,} elements: factors stay resident "
        "and cost one gather a step"
        if sizes.largest_factor > DEFAULT_PERSISTENCE
        else "DeepSpeed's default: at or above the largest trained factor",
        "DeepSpeed issue 5047",
    )
    # From a weight's first use in recomputation to its use in backward lie at most the rest of
    # the block forwards and the whole block backwards.
    reach = max(DEFAULT_LIVE, 2 * sizes.largest_block)
    add(
        "zero_optimization.stage3_max_reuse_distance",
        reach,
        "a layer gathered for recomputation is kept until its backward: two gathers, not three",
        "DeepSpeed's parameter coordinator; counted by the tests",
    )
    add(
        "zero_optimization.stage3_max_live_parameters",
        max(DEFAULT_LIVE, 2 * sizes.largest_block + PREFETCH),
        "room for one layer and the prefetch bucket",
        "DeepSpeed's parameter coordinator; counted by the tests",
    )


def as_config(settings: Sequence[Setting]) -> dict[str, Any]:
    """Nest dotted names into the dictionary that DeepSpeed takes."""
    config: dict[str, Any] = {}
    for setting in settings:
        *path, leaf = setting.name.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[leaf] = setting.value
    return config
