"""The `auto` strategy as a plugin: a run has it only until `anygauge.training.auto` has decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anygauge.interface import (
    API_VERSION,
    BuildContext,
    Engine,
    Setting,
    StrategySpec,
    Workload,
)

AUTO = StrategySpec(
    name="auto",
    factory="anygauge.strategies.auto:Undecided",
    api_version=API_VERSION,
    summary="The default: a whole model on each device where that fits, else the first of fsdp, "
    "zero and their offloading that fits.",
    refuses_fp8=lambda options: "",
)


class Undecided:
    """What a dry run sees of a strategy that the ranks will decide; nothing is built with it."""

    description = "auto"

    def __init__(self, options: Any = None) -> None:
        """Args: options: the run file's section, which has no fields but the name."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """None are known yet."""
        return ()

    def build(self, context: BuildContext) -> Engine:
        """Raises: NotImplementedError: always."""
        raise NotImplementedError("auto was not decided")
