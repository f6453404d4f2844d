"""DeepSpeed's configuration for a run, field by field, each with its reason.

Who shards frozen weights in stage 3: `FlatLayers`, or DeepSpeed. For factors that stay whole,
stages 1 and 3 do the same: masters and state are sharded, and what was updated is gathered once a
step. The rest of stage 3 serves frozen weights, one parameter at a time. So where `FlatLayers` can
gather these, DeepSpeed has what is trained at stage 1, or at stage 2 if its optimizer is offloaded:
there, gradients move to the host as they come.

The defaults of stage 3 are made for a frozen base with low-rank factors: the factors stay resident,
and a frozen weight that gradient checkpointing gathers for recomputation is kept until its
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import HOST_DEVICE, Setting, UnsupportedError, Workload
from anygauge.strategies.shared.common import trained_parameters
from anygauge.strategies.shared.flat import flat_layers_fit
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.zero.deepspeed_versions import ENGINE, offloads_gradients
from anygauge.strategies.zero.spec import ZeroOptions, check_stage_types

DEFAULT_LIVE = 1_000_000_000
PREFETCH = 500_000_000
DEFAULT_BUCKET = 500_000_000
PERSISTENCE = 100_000
"""DeepSpeed's default of ``stage3_param_persistence_threshold``: numbers of what stays whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What DeepSpeed's settings depend on, in elements.

    Attributes:
        trained: of all trained tensors.
        largest_factor: of an adapter's trained factors; 0 without an adapter.
        largest_block: parameters of the largest decoder layer.
        why_not_flat: what of the model keeps its frozen layers from being gathered flat; "": they
            can be.
    """

    trained: int
    largest_factor: int
    largest_block: int
    why_not_flat: str = ""

    @classmethod
    def of(cls, adapted: nn.Module) -> ModelSizes:
        """Measure an adapted model, real or on the meta device."""
        trained = trained_parameters(adapted)
        # peft's names; other weights may be trained too, far too large to stay resident.
        factors = [p.numel() for name, p in trained if ".lora_" in name]
        others = [p.numel() for name, p in trained if ".lora_" not in name]
        blocks = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(adapted)]
        why = ""
        if not flat_layers_fit(adapted):
            why = "its decoder layers are not frozen weights of their own, with an adapter beside"
        elif max(others, default=0) > PERSISTENCE:
            why = "it trains weights that are larger than an adapter's, which stage 3 shards"
        return cls(
            trained=sum(factors) + sum(others),
            largest_factor=max(factors, default=0),
            largest_block=max(blocks, default=0),
            why_not_flat=why,
        )


def why_not_flat(options: ZeroOptions, workload: Workload, sizes: ModelSizes | None) -> str:
    """Explain why a run of stage 3 does not gather frozen layers flat; "" where it does.

    Args:
        sizes: None before the model is known, which may keep it as well.
    """
    graph = workload.backend.graph
    reasons = {
        f"strategy.gather is {options.gather}": options.gather in ("layer", "module"),
        "there is one rank": workload.world_size == 1,
        "strategy.options sets fields of DeepSpeed's own gathering": bool(options.options),
        "strategy.nvme needs DeepSpeed's stage 3": options.nvme is not None,
        "strategy.offload keeps weights on the host": options.offload in ("parameters", "both"),
        "this DeepSpeed's stage 2 does not add up gradients that it offloads": (
            options.offload == "optimizer" and not offloads_gradients()
        ),
        "the adapter begins with values that whole weights give": (
            workload.adapter in ("dora", "taken")
        ),
        "layers are compiled": graph.compiler is not None,
        "it was not tried on a device that accumulates a graph": graph.accumulates,
    }
    of_model = "" if sizes is None else sizes.why_not_flat
    return next((reason for reason, holds in reasons.items() if holds), of_model)


def stage_of(options: ZeroOptions, workload: Workload, sizes: ModelSizes | None) -> int:
    """The stage that DeepSpeed has.

    Args:
        sizes: None before the model is known: that of the run file.

    Raises:
        UnsupportedError: layers are to be gathered flat, and cannot be.
    """
    if options.stage < 3 or sizes is None:
        return options.stage
    why = why_not_flat(options, workload, sizes)
    if not why:
        return 1 if options.offload == "none" else 2
    if options.gather == "flat":
        raise UnsupportedError(
            f"strategy.gather: flat: layers cannot be gathered flat: {why}. Leave it out"
        )
    return 3


def zero_settings(
    options: ZeroOptions, workload: Workload, sizes: ModelSizes | None
) -> list[Setting]:
    """DeepSpeed's fields as settings, named by dotted path; later ones win over earlier ones.

    Args:
        sizes: None before the model is known: fields that depend on it are left out.

    Raises:
        UnsupportedError: DeepSpeed has no such combination of stage and types.
    """
    stage, precision = stage_of(options, workload, sizes), workload.precision
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
    add("zero_optimization.stage", stage, _about_stage(options, workload, sizes))
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


def _about_stage(options: ZeroOptions, workload: Workload, sizes: ModelSizes | None) -> str:
    """Why DeepSpeed has the stage that it has, and who gathers weights."""
    if options.stage < 3:
        return "strategy.stage"
    why = why_not_flat(options, workload, sizes)
    if why:
        return f"strategy.stage; DeepSpeed gathers frozen weights, since {why}"
    if sizes is None:
        return (
            "strategy.stage; 1 for a model whose decoder layers are frozen, beside an adapter: "
            "there anygauge shards and gathers them"
        )
    return (
        "strategy.stage is 3: anygauge shards frozen layers and gathers them in place; DeepSpeed "
        "shards what is trained"
    )


def _add_lora_settings(add: Any, sizes: ModelSizes) -> None:
    threshold = max(PERSISTENCE, sizes.largest_factor)
    add(
        "zero_optimization.stage3_param_persistence_threshold",
        threshold,
        f"the largest trained factor has {sizes.largest_factor:,} elements: factors stay resident "
        "and cost one gather a step"
        if sizes.largest_factor > PERSISTENCE
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
