"""Strategies whose ranks may divide layers or sequences: what one computes, for a plan."""

from __future__ import annotations

from torch import nn

from anygauge.interface.strategy import Workload
from anygauge.strategies.context_parallel import attend_in_parts
from anygauge.strategies.degrees import Degrees
from anygauge.strategies.exchanges import CountedGroup
from anygauge.strategies.footprint import EstimatedStrategy
from anygauge.strategies.tensor_division import divide
from anygauge.strategies.tensor_parallel import connect


class DividedStrategy(EstimatedStrategy):
    """A strategy with `Degrees`."""

    options: Degrees

    def part_of(self, model: nn.Module, workload: Workload) -> None:
        """See `StrategyPlanner.part_of`; a stage of a pipeline has whole layers."""
        options = self.options
        if options.tp > 1:
            group = CountedGroup(options.tp, workload.rank % options.tp)
            connect(model, divide(model, group.size, group.rank), options, group)
        elif options.cp > 1:
            group = CountedGroup(options.cp, workload.rank % options.cp)
            attend_in_parts(model, group, options.cp_method)
