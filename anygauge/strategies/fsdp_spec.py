"""`fsdp` as a plugin: what it needs, and what is refused of it before torch is imported."""

from __future__ import annotations

from typing import Any

from anygauge.interface import (
    API_VERSION,
    FULL,
    Level,
    Requirement,
    RunFileError,
    StrategyRun,
    StrategySpec,
    Support,
    UnsupportedError,
)

IN_PARTS = Support(Level.NOT_WRITTEN_YET, "each rank has a part of the gradients alone")
ON_THE_HOST = Support(
    Level.NOT_WRITTEN_YET, "strategy.offload: the optimizer's tensors lie in the host's memory"
)


def shards(options: Any, world_size: int) -> int:
    """Ranks that hold the model together.

    Raises:
        RunFileError: the degrees do not make up the ranks.
    """
    replicate, shard = options.dp_replicate, options.dp_shard
    if shard > 0 and replicate * shard == world_size:
        return int(shard)
    if shard == -1 and world_size % replicate == 0:
        return int(world_size // replicate)
    divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
    product = f"{replicate} x {shard}" if shard != -1 else f"{replicate} x what is left"
    raise RunFileError(
        f"strategy.dp_replicate and dp_shard: {product} is not {world_size}, the number of ranks "
        f"(--devices times --nodes). Leave dp_shard out, and make dp_replicate one of "
        f"{', '.join(divisors)}"
    )


def check(run: StrategyRun) -> None:
    """Refuse what FSDP2, or anygauge with it, cannot do.

    Raises:
        RunFileError: the degrees do not make up the ranks, or the optimizer needs whole matrices.
        UnsupportedError: the adapter's first values depend on whole weights.
    """
    shards(run.options, run.world_size)
    if run.optimizer == "adafactor":
        raise RunFileError(
            "train.optimizer.name: adafactor keeps one number per row and column of a matrix, but "
            "under strategy fsdp a rank has some of the rows alone. Use train.optimizer.name: "
            "adamw_8bit, or strategy.name: ddp or single"
        )
    if run.adapter == "dora":
        raise UnsupportedError(
            "adapter.dora: DoRA's magnitudes begin as norms of whole weights, which strategy fsdp "
            "divides before it reads them. Leave it out, or use strategy.name: zero, ddp or single"
        )


FSDP = StrategySpec(
    name="fsdp",
    factory="anygauge.strategies.fsdp:Fsdp",
    api_version=API_VERSION,
    summary="torch's FSDP2: weights, gradients and optimizer in parts; HSDP by dp_replicate.",
    options="anygauge.strategies.fsdp_options:FsdpOptions",
    needs=(Requirement(capability="collectives", because="FSDP gathers weights from all ranks"),),
    takes_clip_kernel=lambda options: IN_PARTS,
    takes_update_kernel=lambda options: FULL if options.offload == "none" else ON_THE_HOST,
    # The layout of DeepSpeed's MiCS, which DeepSpeed no longer has: each machine holds the model.
    shorthands={"mics": lambda nodes, devices: {"dp_replicate": nodes}},
    check=check,
)
