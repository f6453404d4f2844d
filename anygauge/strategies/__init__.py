"""How a model is spread over ranks: the strategies that come along, a folder each.

Each is a plugin like anyone else's: `spec` announces it and imports no torch, `engine` builds it,
`footprint` counts its bytes. What engines share is in `shared`, open to other distributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from anygauge.interface import API_VERSION, Setting, StrategySpec, Workload, hookimpl
from anygauge.strategies.ddp.spec import DDP
from anygauge.strategies.fsdp.spec import FSDP
from anygauge.strategies.single.spec import SINGLE
from anygauge.strategies.zero.spec import ZERO

AUTO = StrategySpec(
    name="auto",
    factory="anygauge.strategies:UndecidedStrategy",
    api_version=API_VERSION,
    summary="The default: a whole model on each device where that fits, else the first of fsdp, "
    "zero and their offloading that fits.",
    refuses_fp8=lambda options: "",
)


class UndecidedStrategy:
    """What a dry run has of `auto` until `anygauge.training.auto` has decided; never built."""

    description = "auto"

    def __init__(self, options: Any = None) -> None:
        """Args: options: the run file's section, which has no fields but the name."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Return none, since none are known yet."""
        return ()


@hookimpl
def anygauge_provide_strategies() -> Iterable[StrategySpec]:
    """Announce the strategies of this package."""
    return [ZERO, FSDP, DDP, AUTO, SINGLE]
