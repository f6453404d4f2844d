"""`ddp` as a plugin: its fields, and what is refused of it before torch is imported."""

from __future__ import annotations

from anygauge.interface import (
    API_VERSION,
    AutoForm,
    PlannerHints,
    StrategySpec,
)
from anygauge.strategies.shared.degrees import check_degrees, check_model, rank_share

IN_PARTS = {"clip_grad_norm": "each rank has only a part of the gradients"}


DDP = StrategySpec(
    name="ddp",
    factory="anygauge.strategies.ddp.engine:Ddp",
    api_version=API_VERSION,
    summary="torch's DDP: the whole model on every rank, gradients summed over ranks.",
    options="anygauge.strategies.shared.degrees:Degrees",
    needs={"collectives": "DDP sums gradients"},
    share=rank_share,
    unused_kernels=lambda options: {} if options.tp == options.pp == 1 else IN_PARTS,
    shorthands={
        "tensor": lambda nodes, devices: {"tp": nodes * devices},
        "pipeline": lambda nodes, devices: {"pp": nodes * devices},
    },
    check=check_degrees,
    check_model=check_model,
    hints=PlannerHints(auto=(AutoForm(place=10, alone=False),)),
)
