"""How a model is spread over ranks. `create_strategy` makes the one that a run file names."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from anygauge.interface import RunFileError
from anygauge.strategies.facts import check_section

if TYPE_CHECKING:
    from anygauge.config.schema import StrategySection
    from anygauge.interface.strategy import Strategy

WORLD_SIZES: dict[str, int | None] = {"single": 1, "zero": None}
"""Name -> the number of ranks it needs, or None where any will do."""


def check_name(name: str, world_size: int) -> None:
    """Refuse a strategy that does not exist, or not for so many ranks; imports no torch.

    Raises:
        RunFileError: names the strategies that would do.
    """
    if name not in WORLD_SIZES:
        near = difflib.get_close_matches(name, WORLD_SIZES, 1)
        raise RunFileError(
            f"strategy.name: no strategy {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ";")
            + f" valid: {', '.join(WORLD_SIZES)}"
        )
    needed = WORLD_SIZES[name]
    if needed is not None and world_size != needed:
        raise RunFileError(
            f"strategy.name: {name!r} trains in one process, but {world_size} ranks are asked "
            "for; use --devices 1 and --nodes 1, or strategy.name: zero"
        )


def create_strategy(section: StrategySection, world_size: int) -> Strategy:
    """The strategy that a run file names.

    Raises:
        RunFileError: there is none of that name, or it does not take the options given.
        UnsupportedError: it cannot run with the options given.
    """
    check_name(section.name, world_size)
    check_section(section)
    if section.name == "zero":
        from anygauge.strategies.zero import Zero

        return Zero(section.stage, section.options, section.gather)
    from anygauge.strategies.single import Single

    return Single()
