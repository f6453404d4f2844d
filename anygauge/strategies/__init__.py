"""How a model is spread over ranks: the strategies that come along, a folder each.

Each is a plugin like anyone else's: `spec` announces it and imports no torch, `engine` builds it,
`footprint` counts its bytes. What engines share is in `shared`, open to other distributions.
"""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import StrategySpec, hookimpl
from anygauge.strategies.auto import AUTO
from anygauge.strategies.ddp.spec import DDP
from anygauge.strategies.fsdp.spec import FSDP
from anygauge.strategies.single.spec import SINGLE
from anygauge.strategies.zero.spec import ZERO


@hookimpl
def anygauge_provide_strategies() -> Iterable[StrategySpec]:
    """Announce the strategies of this package."""
    return [ZERO, FSDP, DDP, AUTO, SINGLE]
