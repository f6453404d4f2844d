"""`ddp` as a plugin: its fields, and what is refused of it before torch is imported."""

from __future__ import annotations

from anygauge.interface import (
    API_VERSION,
    AutoForm,
    PlannerHints,
    StrategyRun,
    StrategySpec,
)
from anygauge.strategies.shared.degrees import (
    check_adapter,
    check_codes,
    check_divides,
    check_micro_batches,
    check_model,
    check_optimizer,
    check_recomputation,
    check_routers,
    share,
)

IN_PARTS = {"clip_grad_norm": "each rank has only a part of the gradients"}


def check(run: StrategyRun) -> None:
    """Refuse what the degrees cannot do.

    Raises:
        RunFileError: they do not fit the ranks, or the optimizer needs whole matrices.
        UnsupportedError: the adapter's first values depend on whole weights, or a schedule undoes
            recomputation.
    """
    check_divides(run.options, run.world_size)
    if run.options.tp > 1:
        check_optimizer(run, "strategy.tp")
    for name in ("tp", "pp"):
        if getattr(run.options, name) > 1:
            check_adapter(run, f"strategy.{name}")
    check_routers(run)
    check_micro_batches(run)
    check_recomputation(run)
    check_codes(run)


DDP = StrategySpec(
    name="ddp",
    factory="anygauge.strategies.ddp.engine:Ddp",
    api_version=API_VERSION,
    summary="torch's DDP: the whole model on every rank, gradients summed over ranks.",
    options="anygauge.strategies.shared.degrees:Degrees",
    needs={"collectives": "DDP sums gradients"},
    share=share,
    unused_kernels=lambda options: {} if options.tp == options.pp == 1 else IN_PARTS,
    shorthands={
        "tensor": lambda nodes, devices: {"tp": nodes * devices},
        "pipeline": lambda nodes, devices: {"pp": nodes * devices},
    },
    check=check,
    check_model=check_model,
    hints=PlannerHints(auto=(AutoForm(place=10, alone=False),)),
)
