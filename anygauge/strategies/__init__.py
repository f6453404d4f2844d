"""How a model is spread over ranks. `create_strategy` makes the one that a run file names."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from anygauge.interface import RunFileError

if TYPE_CHECKING:
    from anygauge.config.schema import StrategySection
    from anygauge.strategies.base import Strategy

NAMES = ("single", "zero")


def create_strategy(section: StrategySection) -> Strategy:
    """The strategy that a run file names.

    Raises:
        RunFileError: there is none of that name, or it does not take the options given.
    """
    if section.name == "zero":
        from anygauge.strategies.zero import Zero

        return Zero(section.stage, section.options)
    if section.name == "single":
        from anygauge.strategies.single import Single

        if section.options:
            raise RunFileError(
                f"strategy.options: 'single' has none, but got {', '.join(section.options)}; "
                "remove them"
            )
        return Single()
    near = difflib.get_close_matches(section.name, NAMES, 1)
    raise RunFileError(
        f"strategy.name: no strategy {section.name!r}"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + f" Valid: {', '.join(NAMES)}"
    )
