"""Fields of a run file that several strategies share: what ranks divide in addition to rows."""

from __future__ import annotations

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


def in_words(options: Degrees) -> str:
    """For a strategy's description."""
    if options.pp > 1:
        return f", {options.pp} stages ({options.schedule or '1f1b'})"
    if options.tp > 1:
        parts = " and positions" if options.sequence_parallel else ""
        return f", layers{parts} over {options.tp} ranks"
    return "" if options.cp == 1 else f", sequences over {options.cp} ranks ({options.cp_method})"


def share(options: Any, rank: int, world_size: int) -> Share:
    """Which rows, and which part of them, a rank reads."""
    cp, tp, pp = options.cp, options.tp, options.pp
    if pp > 1 and world_size % pp == 0:
        rows = world_size // pp
        # Ranks of one stage are neighbours: stages send little, once a micro-batch.
        leads = rank < rows
        return Share(rank % rows, rows, leads=leads, stream=rank, one_width=WIDTH)
    if tp > 1 and world_size % tp == 0:
        leads = rank % tp == 0
        return Share(rank // tp, world_size // tp, leads=leads, multiple=tp)
    if cp == 1 or world_size % cp:
        return Share(rank, world_size)
    return Share(
        rank // cp,
        world_size // cp,
        leads=rank % cp == 0,
        stream=rank,
        sequence=SequencePart(rank % cp, cp, all_queries=options.cp_method == "ulysses"),
        multiple=cp,
    )


def check_heads(options: Any, config: Any) -> None:
    """Raises: UnsupportedError: the model's query heads cannot be divided as `cp` asks."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if options.cp == 1 or options.cp_method != "ulysses" or not heads or heads % options.cp == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    raise UnsupportedError(
        f"strategy.cp: {options.cp}: cp_method ulysses divides heads over ranks, but this model "
        f"has {heads} heads. Set strategy.cp to one of {divisors}, or strategy.cp_method: gather"
    )


def check_divides(options: Any, world_size: int) -> None:
    """Raises: RunFileError: the ranks cannot be divided into groups as the degrees ask."""
    degrees = {name: getattr(options, name) for name in ("cp", "tp", "pp")}
    asked = {name: degree for name, degree in degrees.items() if degree > 1}
    if len(asked) > 1:
        raise RunFileError(
            f"strategy: {' and '.join(f'{k} {v}' for k, v in asked.items())} cannot be combined "
            f"yet. Set one of strategy.{' and strategy.'.join(asked)} to 1"
        )
    for name, degree in asked.items():
        if world_size % degree:
            divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
            raise RunFileError(
                f"strategy.{name}: {world_size} ranks (--devices times --nodes) are not a multiple "
                f"of {degree}. Set strategy.{name} to one of {', '.join(divisors)}"
            )

    if options.schedule and options.pp == 1:
        raise RunFileError(
            f"strategy.schedule: {options.schedule}: there is one stage, so there is nothing to "
            "order. Leave it out, or set strategy.pp to the number of stages"
        )


def check_routers(run: StrategyRun) -> None:
    """Raises: UnsupportedError: no rank has what the routers' loss is made of."""
    degrees = {name: getattr(run.options, name) for name in ("cp", "tp", "pp")}
    asked = next((name for name, degree in degrees.items() if degree > 1), None)
    if run.router_aux_loss and asked is not None:
        raise UnsupportedError(
            "train.router_aux_loss_coef: the routers' loss needs all layers and tokens of a "
            f"micro-batch, but under strategy.{asked} no rank has all of them. Set "
            f"strategy.{asked}: 1, or leave train.router_aux_loss_coef out"
        )


def check_optimizer(run: StrategyRun, because: str) -> None:
    """Refuse an optimizer that needs whole matrices, or plain tensors.

    Args:
        because: the field under which a rank has parts of them.

    Raises:
        RunFileError: names one that does not.
        UnsupportedError: bitsandbytes' paged memory is asked for.
    """
    if run.paged:
        raise UnsupportedError(
            f"train.optimizer.paged: bitsandbytes pages only plain tensors, but under {because} a "
            "parameter is a shard of a distributed tensor. Leave it out, or use strategy.name: ddp "
            "or single without degrees"
        )
    if run.optimizer == "adafactor":
        raise RunFileError(
            "train.optimizer.name: adafactor keeps one number per row and column of a matrix, but "
            f"under {because} a rank has only a part of it. Use train.optimizer.name: adamw_8bit, "
            "or strategy.name: ddp or single without degrees"
        )


def check_adapter(run: StrategyRun, because: str) -> None:
    """Refuse an adapter whose first values depend on whole weights.

    Raises:
        UnsupportedError: names strategies that read them first.
    """
    if run.adapter == "dora":
        raise UnsupportedError(
            f"adapter.dora: DoRA's magnitudes start as norms of whole weights, but {because} "
            "divides the weights before it reads them. Leave it out, or use strategy.name: zero, "
            "ddp or single without degrees"
        )
    if run.adapter == "taken":
        raise UnsupportedError(
            f"adapter.init: its factors are computed from whole weights, but {because} divides the "
            "weights before it reads them. Set adapter.init: true, or use strategy.name: zero, ddp "
            "or single without degrees"
        )


def check_codes(run: StrategyRun) -> None:
    """Raises: UnsupportedError: a quantised layer would be cut between its codes' blocks."""
    if run.quantised and run.options.tp > 1:
        raise UnsupportedError(
            "model.quantise: strategy.tp cuts weights by rows and columns, but quantised codes "
            "come in blocks that share a scale. Leave strategy.tp out, or model.quantise"
        )


def stages_per_rank(options: Any) -> int:
    """How many stages of a pipeline each rank has."""
    return 2 if options.schedule in ("interleaved", "zero_bubble") else 1


def check_layers(options: Any, config: Any) -> None:
    """Raises: UnsupportedError: there are more stages than layers."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    stages = options.pp * stages_per_rank(options)
    if options.pp == 1 or layers is None or layers >= stages:
        return
    most = layers // stages_per_rank(options)
    raise UnsupportedError(
        f"strategy.pp: {options.pp} ranks with schedule {options.schedule or '1f1b'} make {stages} "
        f"stages, but the model has only {layers} layers. Set strategy.pp to at most {most}"
    )


def check_recomputation(run: StrategyRun) -> None:
    """Raises: UnsupportedError: a schedule would undo what recomputation saves."""
    if run.options.schedule == "zero_bubble" and run.activations.every:
        raise UnsupportedError(
            "strategy.schedule: zero_bubble computes the gradients of weights one by one, after "
            "those of hidden states: torch recomputes a layer for each of its trained weights, and "
            "keeps all of it until the last. Set strategy.schedule: 1f1b, or "
            "train.gradient_checkpointing: false"
        )


def check_micro_batches(run: StrategyRun) -> None:
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
    check_heads(options, config)
    check_model_divides(options, config)
    check_layers(options, config)
