"""Capabilities: what a device can do, how fully, and why not where it cannot."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How far a capability reaches. The last four are refusals for different causes."""

    FULL = "full"
    PARTIAL = "partial"
    UNSUPPORTED_BY_HARDWARE = "unsupported by the hardware"
    UNSUPPORTED_BY_VERSION = "unsupported by this version"
    NOT_WRITTEN_YET = "not written yet"
    SWITCHED_OFF = "switched off"

    def __bool__(self) -> bool:
        return self in (Level.FULL, Level.PARTIAL)


@dataclass(frozen=True, slots=True)
class Support:
    """One capability's level and its reason; anything short of full must give one."""

    level: Level
    reason: str = ""

    def __post_init__(self) -> None:
        if self.level is not Level.FULL and not self.reason:
            raise ValueError(f"Support({self.level.name}) needs a reason")

    def __bool__(self) -> bool:
        return bool(self.level)

    def __str__(self) -> str:
        return self.level.value + (f" ({self.reason})" if self.reason else "")


FULL = Support(Level.FULL)
