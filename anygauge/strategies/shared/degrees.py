"""Fields of a run file that several strategies share: what ranks divide in addition to rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.interface import (
    Options,
    RunFileError,
    SequencePart,
    Share,
    StrategyRun,
    UnsupportedError,
)
from anygauge.strategies.shared.tensor_plans import check_model_divides


class ContextParallel(Options):
    """Fields for sequences that are divided over ranks."""

    cp: Annotated[int, Field(ge=1)] = Field(
        1, description="Context parallelism: how many neighbouring ranks divide every sequence."
    )
    cp_method: Literal["gather", "ulysses"] = Field(
        "gather",
        description="With cp, attention gathers keys and values (gather) or exchanges heads "
        "(ulysses).",
    )


class Degrees(ContextParallel):
    """Fields for layers that are divided over ranks, too."""

    tp: Annotated[int, Field(ge=1)] = Field(
        1, description="Tensor parallelism: how many neighbouring ranks divide every layer."
    )
    sequence_parallel: bool = Field(
        True,
        description="With tp: between layers, these ranks divide the positions of a sequence.",
    )

    pp: Annotated[int, Field(ge=1)] = Field(
        1, description="Pipeline parallelism: how many stages, each with its own layers and ranks."
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None = Field(
        None, description="With pp: the order of forwards and backwards; 1f1b if left out."
    )


WIDTH = 64
"""A pipeline has one shape of micro-batches: their widths are multiples of this."""

CANNOT_COMBINE: Mapping[tuple[str, str], tuple[str, str]] = {
    ("cp", "tp"): (
        "both divide the positions of a sequence",
        "Set strategy.cp: 1 (strategy.tp with sequence_parallel divides positions, too), or "
        "strategy.tp: 1",
    ),
    ("cp", "pp"): (
        "a stage makes masks of whole sequences",
        "Set strategy.cp: 1 (strategy.tp divides positions within stages), or strategy.pp: 1",
    ),
    ("fsdp", "pp"): (
        "FSDP2 would gather a stage's weights for each of its micro-batches",
        "Use strategy.name: ddp with strategy.tp and strategy.pp, or strategy.pp: 1 to shard",
    ),
}
"""Pairs of fields, or of a strategy and a field -> why they cannot be, and what to use instead."""


def mesh_axes(options: Any, world_size: int) -> dict[str, int]:
    """The axes of the mesh of all ranks, the outermost first, and how many ranks are along each.

    Ranks that send each other most are neighbours: those of a layer, then those of a sequence, then
    those that shard weights and those that sum gradients; stages send least.
    """
    rows = world_size // (options.pp * options.cp * options.tp)
    data = getattr(options, "dp_replicate", rows)
    return {
        "pipeline": options.pp,
        "data": data,
        "shard": rows // data,
        "context": options.cp,
        "tensor": options.tp,
    }


def in_words(options: Degrees) -> str:
    """Describe the degrees for a strategy's description."""
    words = ""
    if options.pp > 1:
        words += f", {options.pp} stages ({options.schedule or '1f1b'})"
    if options.tp > 1:
        parts = " and positions" if options.sequence_parallel else ""
        words += f", layers{parts} over {options.tp} ranks"
    if options.cp > 1:
        words += f", sequences over {options.cp} ranks ({options.cp_method})"
    return words


def rank_share(options: Any, rank: int, world_size: int) -> Share:
    """Which rows, and which part of them, a rank reads."""
    cp, tp, pp = options.cp, options.tp, options.pp
    if world_size % (cp * tp * pp):  # refused elsewhere
        return Share(rank, world_size)
    rows = world_size // (cp * tp * pp)
    outer, tensor = divmod(rank, tp)
    outer, context = divmod(outer, cp)
    stage, row = divmod(outer, rows)
    return Share(
        row,
        rows,
        leads=stage == context == tensor == 0,
        # Ranks that divide layers draw alike; each stage and part of a sequence for itself.
        stream=rank // tp,
        sequence=SequencePart(context, cp, all_queries=options.cp_method == "ulysses")
        if cp > 1
        else None,
        multiple=cp * tp,
        one_width=WIDTH if pp > 1 else 0,
    )


def check_divides(options: Any, world_size: int, strategy: str = "ddp") -> None:
    """Refuse degrees that cannot be together, or do not make up the ranks.

    Raises:
        RunFileError: names those that would do.
    """
    degrees = {name: getattr(options, name) for name in ("cp", "tp", "pp")}
    asked = {name: degree for name, degree in degrees.items() if degree > 1}
    for pair, (why, instead) in CANNOT_COMBINE.items():
        if all(one == strategy or one in asked for one in pair):
            named = [f"{one}: {asked[one]}" if one in asked else f"name: {one}" for one in pair]
            raise RunFileError(
                f"{' and '.join(f'strategy.{each}' for each in named)} cannot be combined: {why}. "
                f"{instead}"
            )
    ranks, over = world_size, ""
    for name, degree in asked.items():
        if ranks % degree:
            divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
            raise RunFileError(
                f"strategy.{name}: {world_size} ranks (--devices times --nodes){over} are not a "
                f"multiple of {degree}. Set strategy.{name} to one of {', '.join(divisors)}"
            )
        ranks //= degree
        over += f" divided by strategy.{name} {degree}"

    if options.schedule and options.pp == 1:
        raise RunFileError(
            f"strategy.schedule: {options.schedule}: there is one stage, so there is nothing to "
            "order. Leave it out, or set strategy.pp to the number of stages"
        )


def check_degrees(run: StrategyRun, strategy: str = "ddp") -> None:
    """Refuse what ranks cannot do that have parts of layers, sequences or weights.

    Raises:
        RunFileError, UnsupportedError: says what to use instead.
    """
    options = run.options
    check_divides(options, run.world_size, strategy)
    divided = [f"strategy.{n}" for n in ("cp", "tp", "pp") if getattr(options, n) > 1]
    # Under what a rank has some of the weights, or parts of each.
    some = next((field for field in divided if field != "strategy.cp"), "")
    parts = some if options.tp > 1 else ""
    if strategy == "fsdp":
        some = parts = "strategy fsdp"
    if run.paged and parts:
        raise UnsupportedError(
            f"train.optimizer.paged: bitsandbytes pages only plain tensors, but under {parts} a "
            "parameter is a shard of a distributed tensor. Leave it out, or use strategy.name: ddp "
            "or single without degrees"
        )
    if run.optimizer_sees_full_parameters and parts:
        raise RunFileError(
            f"train.optimizer.name: {run.optimizer} updates whole matrices, but under {parts} a "
            "rank has only parts of them. Use train.optimizer.name: adamw_8bit, or "
            "strategy.name: ddp or single without degrees"
        )
    if run.adapter == "dora" and some:
        raise UnsupportedError(
            f"adapter.dora: DoRA's magnitudes start as norms of whole weights, but {some} divides "
            "the weights before it reads them. Leave it out, or use strategy.name: zero, ddp or "
            "single without degrees"
        )
    if run.adapter == "taken" and some:
        raise UnsupportedError(
            f"adapter.init: its factors are computed from whole weights, but {some} divides the "
            "weights before it reads them. Set adapter.init: true, or use strategy.name: zero, ddp "
            "or single without degrees"
        )
    if run.pairs and divided:
        raise UnsupportedError(
            "objective: the loss of pairs needs the scores of whole sequences from the whole "
            f"model, but under {divided[0]} no rank has them. Set {divided[0]}: 1 (strategy.name: "
            "fsdp or zero shards weights)"
        )
    if run.router_aux_loss and divided:
        raise UnsupportedError(
            "train.router_aux_loss_coef: the routers' loss needs all layers and tokens of a "
            f"micro-batch, but under {divided[0]} no rank has all of them. Set {divided[0]}: 1, or "
            "leave train.router_aux_loss_coef out"
        )
    if run.quantized and options.tp > 1:
        raise UnsupportedError(
            "model.quantize: strategy.tp cuts weights by rows and columns, but quantized codes "
            "come in blocks that share a scale. Leave strategy.tp out, or model.quantize"
        )
    if options.schedule == "zero_bubble" and run.activations.every:
        raise UnsupportedError(
            "strategy.schedule: zero_bubble computes the gradients of weights one by one, after "
            "those of hidden states: torch recomputes a layer for each of its trained weights, and "
            "keeps all of it until the last. Set strategy.schedule: 1f1b, or "
            "train.gradient_checkpointing: false"
        )
    _check_micro_batches(run)


def stages_per_rank(options: Any) -> int:
    """How many stages of a pipeline each rank has."""
    return 2 if options.schedule in ("interleaved", "zero_bubble") else 1


def _check_micro_batches(run: StrategyRun) -> None:
    """Refuse a step that a schedule cannot order.

    Raises:
        RunFileError: names numbers of micro-batches that it can.
    """
    options, given = run.options, run.micro_batches
    schedule = options.schedule or "1f1b"
    if options.pp == 1 or not given:
        return
    good = {
        "1f1b": given >= options.pp,
        "interleaved": given % max(1, given // options.pp) == 0,
    }
    if good.get(schedule, True):
        return
    wanted = (
        f"at least {options.pp}"
        if schedule == "1f1b"
        else f"a multiple of {options.pp}, or fewer than {2 * options.pp}"
    )
    raise RunFileError(
        f"strategy.schedule: {schedule} on {options.pp} ranks needs {wanted} micro-batches, but a "
        f"rank has {given} in a step. Change train.global_batch_size or train.micro_batch_size, or "
        "set strategy.schedule: gpipe"
    )


def check_model(options: Any, config: Any) -> None:
    """Raises: UnsupportedError: the model cannot be divided as the degrees ask."""
    check_model_divides(options, config)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if options.cp > 1 and options.cp_method == "ulysses" and heads and heads % options.cp:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UnsupportedError(
            f"strategy.cp: {options.cp}: cp_method ulysses divides heads over ranks, but this "
            f"model has {heads} heads. Set strategy.cp to one of {divisors}, or "
            "strategy.cp_method: gather"
        )
    layers = getattr(text, "num_hidden_layers", None)
    each = stages_per_rank(options)
    if options.pp > 1 and layers is not None and layers < options.pp * each:
        raise UnsupportedError(
            f"strategy.pp: {options.pp} ranks with schedule {options.schedule or '1f1b'} make "
            f"{options.pp * each} stages, but the model has only {layers} layers. Set strategy.pp "
            f"to at most {layers // each}"
        )
