"""`fsdp` as a plugin: its fields, and what is refused of it before torch is imported."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anygauge.interface import (
    API_VERSION,
    AutoForm,
    PlannerHints,
    RunFileError,
    StrategyRun,
    StrategySpec,
)
from anygauge.strategies.shared.degrees import (
    Degrees,
    check_degrees,
    check_divides,
    check_model,
    rank_share,
)

IN_PARTS = {"clip_grad_norm": "each rank has only a part of the gradients"}
ON_THE_HOST = {"adamw": "strategy.offload: the optimizer's tensors lie in the host's memory"}


class FsdpOptions(Degrees):
    """Fields of ``strategy`` other than its name."""

    dp_replicate: Annotated[int, Field(ge=1)] = Field(
        1, description="Number of groups of ranks that each hold a whole model; above 1: HSDP."
    )
    dp_shard: Annotated[int, Field(ge=-1)] = Field(
        -1, description="The model is sharded over dp_shard x cp ranks; -1: over all that are left."
    )
    gather: Literal["auto", "flat", "layer", "step"] = Field(
        "auto",
        description="How weights are gathered. flat: frozen ones of each decoder layer from flat "
        "pieces, in place; layer: by FSDP2, for each layer's forward and backward; step: once a "
        "step; auto: flat where it can be, else layer.",
    )
    offload: Literal["none", "both"] = Field(
        "none", description="both: weights and optimizer lie in the host's memory between uses."
    )


def num_shards(options: FsdpOptions, world_size: int) -> int:
    """Ranks that hold the model together, those with other parts of the same sequences among them.

    Raises:
        RunFileError: the degrees do not make up the ranks.
    """
    check_divides(options, world_size, "fsdp")
    others = {name: getattr(options, name) for name in ("cp", "tp")}
    replicate, shard = options.dp_replicate, options.dp_shard
    rows = world_size // (options.cp * options.tp)
    if shard == -1 and rows % replicate == 0:
        shard = rows // replicate
    if shard > 0 and replicate * shard == rows:
        return shard * options.cp
    divisors = [str(n) for n in range(1, rows + 1) if rows % n == 0]
    product = f"{replicate} x {shard} is not"
    if shard == -1:
        product = f"dp_replicate {replicate} does not divide"
    over = "".join(f" divided by strategy.{name} {n}" for name, n in others.items() if n > 1)
    raise RunFileError(
        f"strategy.dp_replicate and dp_shard: {product} {rows}, the number of ranks "
        f"(--devices times --nodes){over}. Leave dp_shard out, and set dp_replicate to one of "
        f"{', '.join(divisors)}"
    )


def check(run: StrategyRun) -> None:
    """Refuse what FSDP2, or anygauge with it, cannot do.

    Raises:
        RunFileError: the degrees do not make up the ranks; or as `check_degrees`.
    """
    num_shards(run.options, run.world_size)
    check_degrees(run, "fsdp")


FSDP = StrategySpec(
    name="fsdp",
    factory="anygauge.strategies.fsdp.engine:Fsdp",
    api_version=API_VERSION,
    summary="torch's FSDP2 shards weights, gradients and optimizer; HSDP with dp_replicate.",
    options="anygauge.strategies.fsdp.spec:FsdpOptions",
    needs={"collectives": "FSDP gathers weights from all ranks"},
    engine="fsdp2",
    share=rank_share,
    unused_kernels=lambda o: IN_PARTS if o.offload == "none" else IN_PARTS | ON_THE_HOST,
    # The layout of DeepSpeed's MiCS, which DeepSpeed no longer has: each machine holds the model.
    shorthands={"mics": lambda nodes, devices: {"dp_replicate": nodes}},
    check=check,
    check_model=check_model,
    hints=PlannerHints(
        lighter=(
            ({}, "weights are gathered by layer"),
            ({"offload": "both"}, "weights and optimizer lie in the host's memory"),
        ),
        auto=(AutoForm(place=20, alone=False), AutoForm(place=50, options={"offload": "both"})),
    ),
)
