"""`ddp` as a plugin: its fields, and what is refused of it before torch is imported."""

from __future__ import annotations

from anygauge.interface import API_VERSION, Requirement, StrategyRun, StrategySpec
from anygauge.strategies.degrees import check_divides, check_heads, share


def check(run: StrategyRun) -> None:
    """Raises: RunFileError: the degrees do not fit the ranks."""
    check_divides(run.options, run.world_size)


DDP = StrategySpec(
    name="ddp",
    factory="anygauge.strategies.ddp:Ddp",
    api_version=API_VERSION,
    summary="torch's DDP: the whole model on every rank, gradients summed over ranks.",
    options="anygauge.strategies.degrees:ContextParallel",
    needs=(Requirement(capability="collectives", because="DDP sums gradients"),),
    share=share,
    check=check,
    check_model=check_heads,
)
