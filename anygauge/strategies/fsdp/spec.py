"""`fsdp` as a plugin: what it needs, and what is refused of it before torch is imported."""

from __future__ import annotations

from typing import Any

from anygauge.interface import (
    API_VERSION,
    AutoForm,
    PlannerHints,
    RunFileError,
    StrategyRun,
    StrategySpec,
)
from anygauge.strategies.shared.degrees import (
    check_adapter,
    check_codes,
    check_divides,
    check_model,
    check_optimizer,
    check_routers,
    share,
)

IN_PARTS = {"clip_grad_norm": "each rank has only a part of the gradients"}
ON_THE_HOST = {"adamw": "strategy.offload: the optimizer's tensors lie in the host's memory"}


def shards(options: Any, world_size: int) -> int:
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
        return int(shard * options.cp)
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
        RunFileError: the degrees do not make up the ranks, or the optimizer needs whole matrices.
        UnsupportedError: the adapter's first values depend on whole weights.
    """
    shards(run.options, run.world_size)
    check_optimizer(run, "strategy fsdp")
    check_adapter(run, "strategy fsdp")
    check_routers(run)
    check_codes(run)


FSDP = StrategySpec(
    name="fsdp",
    factory="anygauge.strategies.fsdp.engine:Fsdp",
    api_version=API_VERSION,
    summary="torch's FSDP2 shards weights, gradients and optimizer; HSDP with dp_replicate.",
    options="anygauge.strategies.fsdp.options:FsdpOptions",
    needs={"collectives": "FSDP gathers weights from all ranks"},
    engine="fsdp2",
    share=share,
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
