"""Fields of a run file that several strategies share: over what ranks are divided besides rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from anygauge.interface import RunFileError, SequencePart, Share, UnsupportedError


class ContextParallel(BaseModel):
    """Fields for sequences that are divided over ranks."""

    cp: Annotated[int, Field(ge=1)] = Field(
        1, description="Neighbouring ranks that each have a part of every sequence."
    )
    cp_method: Literal["gather", "ulysses"] = Field(
        "gather", description="Attention: keys and values are gathered, or heads exchanged."
    )


def share(options: Any, rank: int, world_size: int) -> Share:
    """Which rows, and which part of them, a rank reads."""
    cp = options.cp
    if cp == 1 or world_size % cp:
        return Share(rank, world_size)
    return Share(
        rank // cp,
        world_size // cp,
        leads=rank % cp == 0,
        stream=rank,
        sequence=SequencePart(rank % cp, cp, all_queries=options.cp_method == "ulysses"),
    )


def check_heads(options: Any, config: Any) -> None:
    """Raises: UnsupportedError: the model's query heads cannot be divided as `cp` asks."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if options.cp == 1 or options.cp_method != "ulysses" or not heads or heads % options.cp == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    raise UnsupportedError(
        f"strategy.cp: {options.cp}: cp_method ulysses divides heads over ranks, and this model "
        f"has {heads}. Set strategy.cp to one of {divisors}, or strategy.cp_method: gather"
    )


def check_divides(options: Any, world_size: int) -> None:
    """Raises: RunFileError: the ranks cannot be divided into groups of `cp`."""
    if world_size % options.cp:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise RunFileError(
            f"strategy.cp: {world_size} ranks (--devices times --nodes) are no multiple of "
            f"{options.cp}. Set strategy.cp to one of {', '.join(divisors)}"
        )
