"""How a model is spread over ranks: the strategies that come along, and what engines share.

Each strategy is a plugin like anyone else's; nothing here imports torch. A strategy of another
distribution may use `common`, `materialise` and `state` of this package.
"""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import API_VERSION, AutoForm, PlannerHints, StrategySpec, hookimpl
from anygauge.strategies.auto import AUTO
from anygauge.strategies.ddp_spec import DDP
from anygauge.strategies.fsdp_spec import FSDP
from anygauge.strategies.zero_spec import ZERO


@hookimpl
def anygauge_provide_strategies() -> Iterable[StrategySpec]:
    """Announce the strategies of this package."""
    return [
        ZERO,
        FSDP,
        DDP,
        AUTO,
        StrategySpec(
            name="single",
            factory="anygauge.strategies.single:Single",
            api_version=API_VERSION,
            summary="One process, one device, plain torch.",
            reference=True,
            single_process=True,
            refuses_fp8=lambda options: "",
            hints=PlannerHints(auto=(AutoForm(place=10),)),
        ),
    ]
