"""How Gaudi executes: accumulated graphs, compiled regions, or one operation after another."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from anygauge_hpu.software import LAZY_BY_DEFAULT_BEFORE, PLUGIN, major_minor

LAZY_VARIABLE = "PT_HPU_LAZY_MODE"


class Mode(enum.StrEnum):
    """The modes; `COMPILE` and `EAGER` are one to Gaudi's software, which calls both eager."""

    LAZY = "lazy"
    COMPILE = "compile"
    EAGER = "eager"

    @property
    def variable(self) -> str:
        """What `LAZY_VARIABLE` must be."""
        return "1" if self is Mode.LAZY else "0"


def choose_mode(asked: str | None, libraries: Mapping[str, str]) -> tuple[Mode, str]:
    """The mode of a run and why. Pure.

    Args:
        asked: the run file's ``backend_options.mode``.
        libraries: installed distributions and their versions.
    """
    if asked is not None:
        return Mode(asked), "backend_options.mode"
    version = libraries.get(PLUGIN)
    known = major_minor(version)
    if known is None:
        return Mode.COMPILE, f"{PLUGIN} is not installed here: as releases since 1.21 do"
    if known < LAZY_BY_DEFAULT_BEFORE:
        return Mode.LAZY, f"the default of {PLUGIN} {version}"
    return Mode.COMPILE, f"the default of {PLUGIN} {version} is eager mode, which compiles regions"
