"""`zero` as a plugin: its fields, what it needs, and what is refused before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.interface import (
    API_VERSION,
    AutoForm,
    Options,
    PlannerHints,
    Precision,
    RunFileError,
    StrategyRun,
    StrategySpec,
    UnsupportedError,
)
from anygauge.strategies.zero.deepspeed_versions import (
    DISK_SINCE,
    ENGINE,
    NON_REENTRANT_SINCE,
    is_at_least,
    needs_reentrant_checkpointing,
    offloads_gradients,
)


class ZeroOptions(Options):
    """Fields of ``strategy`` other than its name."""

    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        3,
        description="What is sharded. 0: nothing; 1: optimizer state; 2: also gradients; 3: also "
        "weights.",
    )
    gather: Literal["auto", "flat", "layer", "module"] = Field(
        "auto",
        description="Stage 3: how frozen weights are gathered. flat: each decoder layer from flat "
        "pieces, in place; layer or module: by DeepSpeed, a decoder layer or a module at a time; "
        "auto: flat where it can be, else layer.",
    )
    offload: Literal["none", "optimizer", "parameters", "both"] = Field(
        "none",
        description="What to keep in the host's memory between uses; parameters and both need "
        "stage 3.",
    )
    nvme: str | None = Field(
        None,
        description="With offload: optimizer in stage 3: keep the optimizer in this folder, on a "
        "local disk of each machine.",
    )
    reentrant: bool = Field(
        False,
        description="Recompute layers by torch's reentrant form, which some devices need, also "
        "where DeepSpeed does not.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of DeepSpeed's zero_optimization that win over ours.",
    )


def check(run: StrategyRun) -> None:
    """Refuse what DeepSpeed, or anygauge with it, cannot do.

    Raises:
        UnsupportedError: the optimizer would be off the device, or no such types are combined.
        RunFileError: there is no such field, or the optimizer cannot work on flat vectors.
        NotAvailableError: what the run file asks for is not on this machine.
    """
    options = run.options
    for name, value in options.options.items():
        if _offloads(name, value):
            raise UnsupportedError(
                f"strategy.options.{name}: with this field DeepSpeed accepts only its own "
                "optimizer, unless another field is set that strategy.options cannot reach. Leave "
                "it out, and set strategy.offload: optimizer, parameters or both, and "
                "strategy.nvme for a disk"
            )
    if options.gather == "flat" and options.stage < 3:
        raise UnsupportedError(
            f"strategy.gather: flat: stage {options.stage} keeps all weights on every device. Set "
            "strategy.stage: 3, or leave it out"
        )
    if options.offload != "none" and options.stage == 0:
        raise UnsupportedError(
            f"strategy.offload: {options.offload}: DeepSpeed's stage 0 offloads nothing. Set "
            "strategy.stage: 1 or higher, or leave it out"
        )
    wrong_sums = run.ranks_run_here and not offloads_gradients()
    if wrong_sums and options.offload == "optimizer" and options.stage in (1, 2):
        raise UnsupportedError(
            f"strategy.offload: optimizer: in stage {options.stage}, DeepSpeed "
            f"{metadata.version(ENGINE)} trains with other losses when it offloads than when it "
            "does not (seen in 0.16.9; in 0.19.8 they are the same). Set strategy.stage: 3, or "
            "leave it out"
        )
    if options.offload in ("parameters", "both") and options.stage < 3:
        raise UnsupportedError(
            f"strategy.offload: {options.offload}: stage {options.stage} keeps all weights on "
            "every device. Set strategy.stage: 3, or strategy.offload: optimizer"
        )
    if options.nvme is not None:
        _check_disk(run)
    if run.ranks_run_here:
        _check_recomputation(run)
    if run.quantized and options.stage == 3 and run.ranks_run_here and not offloads_gradients():
        raise UnsupportedError(
            f"model.quantize: stage 3 of DeepSpeed {metadata.version(ENGINE)} gathers only weights "
            "of one type, but quantized codes are bytes. Use strategy.stage: 2, or strategy.name: "
            "fsdp"
        )
    if run.paged:
        raise UnsupportedError(
            "train.optimizer.paged: DeepSpeed moves the optimizer's state in its own way, and was "
            "not tested with bitsandbytes' paging. Set strategy.offload: optimizer instead, or use "
            "strategy.name: ddp or single"
        )
    if run.optimizer_sees_full_parameters and options.stage > 0:
        raise RunFileError(
            f"train.optimizer.name: {run.optimizer} updates whole matrices, but strategy zero, "
            f"stage {options.stage}, joins parameters into flat vectors, on which it would be a "
            "different optimizer. Use strategy.name: single, strategy.stage: 0, or "
            "train.optimizer.name: adamw_8bit"
        )
    if run.optimizer_changes_weights:
        raise UnsupportedError(
            f"train.optimizer.name: {run.optimizer} evaluates other weights than it trains, which "
            "DeepSpeed cannot exchange. Use strategy.name: fsdp, ddp or single"
        )
    if run.precision is not None:
        check_stage_types(options.stage, run.precision)


def unused_kernels(options: Any) -> Mapping[str, str]:
    """See `StrategySpec.unused_kernels`: DeepSpeed steps the optimizer that it is given.

    In stages 1 to 3 on flat float32 parts, one after another in stage 3.
    """
    unused = {"clip_grad_norm": "DeepSpeed clips flattened parts of gradients itself"}
    if options.offload != "none":
        unused["adamw"] = "strategy.offload: the optimizer's tensors lie in the host's memory"
    elif options.stage == 0:
        unused["adamw"] = (
            "strategy zero, stage 0: kernels were tested with the flat parts of other stages alone"
        )
    return unused


def refuses_fp8(options: Any) -> str:
    """See `StrategySpec.refuses_fp8`: in all stages, with everything on the device."""
    on_device = options.offload == "none"
    return "" if on_device else "strategy.offload: not tried with weights or state on the host"


ZERO = StrategySpec(
    name="zero",
    factory="anygauge.strategies.zero.engine:Zero",
    api_version=API_VERSION,
    summary="DeepSpeed's ZeRO, stages 0 to 3, over all ranks.",
    options="anygauge.strategies.zero.spec:ZeroOptions",
    needs={"collectives": "ZeRO shards over ranks"},
    engine=ENGINE,
    distributions=(ENGINE,),
    install="pip install 'anygauge[zero]'",
    unused_kernels=unused_kernels,
    refuses_fp8=refuses_fp8,
    check=check,
    hints=PlannerHints(
        lighter=(
            ({"stage": 3}, "weights are gathered by layer"),
            (
                {"stage": 3, "offload": "optimizer"},
                "the optimizer lies in the host, and updates there",
            ),
            ({"stage": 3, "offload": "both"}, "weights and optimizer lie in the host's memory"),
        ),
        auto=(
            AutoForm(place=30, alone=False),
            AutoForm(place=40, options={"offload": "optimizer"}),
            AutoForm(place=60, options={"offload": "both"}),
        ),
    ),
)


def _check_disk(run: StrategyRun) -> None:
    """Refuse what DeepSpeed would not put on a disk, or wrongly, without a word."""
    if run.options.offload != "optimizer" or run.options.stage != 3:
        raise RunFileError(
            "strategy.nvme: says where an offloaded optimizer of stage 3 goes; with weights on a "
            "disk, too, a rank of DeepSpeed 0.19.8 ended without a message. Set "
            "strategy.offload: optimizer and strategy.stage: 3, or leave it out"
        )
    if run.optimizer == "adamw_8bit":
        raise UnsupportedError(
            "train.optimizer.name: adamw_8bit: DeepSpeed writes only 32-bit state to a disk "
            "(strategy.nvme). Use adamw, lion or sgd"
        )
    if run.ranks_run_here and not is_at_least(DISK_SINCE):
        raise UnsupportedError(
            f"strategy.nvme: tested with DeepSpeed {'.'.join(map(str, DISK_SINCE))}, not with "
            f"{metadata.version(ENGINE)}. Leave it out to keep the optimizer in the host's memory"
        )


def _check_recomputation(run: StrategyRun) -> None:
    """Refuse what torch's reentrant form cannot do where it is used, or where it is not and must
    be."""
    needed, chosen = needs_reentrant_checkpointing(), run.options.reentrant
    installed, since = metadata.version(ENGINE), ".".join(map(str, NON_REENTRANT_SINCE))
    if run.reentrant_only and run.activations.every and not (needed or chosen):
        raise UnsupportedError(
            f"strategy.reentrant: false: with DeepSpeed {installed}, layers would be recomputed by "
            f"torch's non-reentrant form, as from {since} on, but {run.reentrant_only}. Set "
            "strategy.reentrant: true, or use the DeepSpeed that the device's vendor builds, which "
            "`anygauge doctor` names"
        )
    if not (needed or chosen):
        return
    why = "strategy.reentrant asks for" if chosen else f"DeepSpeed {installed} needs"
    remedy = "Leave strategy.reentrant out" if chosen and not needed else "Leave it out"
    if run.activations.selective:
        raise UnsupportedError(
            f"train.gradient_checkpointing.selective: {why} torch's reentrant form, which can only "
            f"recompute whole layers. DeepSpeed needs it no longer from {since} on. {remedy}, or "
            "use strategy.name: fsdp"
        )
    if run.router_aux_loss and run.activations.every:
        raise UnsupportedError(
            f"train.router_aux_loss_coef: {why} torch's reentrant form of recomputation, in which "
            "the routers' loss has no gradient. Set train.gradient_checkpointing: false, or use "
            "strategy.name: fsdp"
        )


def _offloads(name: str, value: Any) -> bool:
    """Whether a field of DeepSpeed's zero_optimization moves something off the device.

    Former names end in ``_offload``, and are true or false.
    """
    if name in ("offload_optimizer", "offload_param"):
        device = value.get("device") if isinstance(value, dict) else value
        return device not in (None, "none")
    return name.endswith("_offload") and bool(value)


def check_stage_types(stage: int, precision: Precision) -> None:
    """Refuse types of numbers that a stage does not combine.

    Raises:
        UnsupportedError: DeepSpeed has no such combination of stage and types.
    """
    if stage == 0 and precision.reduce_dtype != precision.param_dtype:
        raise UnsupportedError(
            f"strategy zero, stage 0: DeepSpeed accumulates gradients in the compute type "
            f"({precision.param_dtype}) there, not in {precision.reduce_dtype}. Set "
            "precision.reduce_dtype: param_dtype, or strategy.stage: 1 or higher."
        )
