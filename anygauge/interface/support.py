"""How far a device can do what a run may ask of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CAPABILITIES", "FULL", "Level", "Support"]


class Level(enum.Enum):
    """How far a capability reaches. The last four are refusals for different causes.

    ``PARTIAL`` works at a price, so that ``auto`` leaves it alone. ``DEPENDS`` is for a device that
    is not open yet, where opening settles it.
    """

    FULL = "full"
    PARTIAL = "partial"
    DEPENDS = "depends on the device that is opened"
    UNSUPPORTED_BY_HARDWARE = "unsupported by the hardware"
    UNSUPPORTED_BY_VERSION = "unsupported by this version"
    NOT_WRITTEN_YET = "not written yet"
    SWITCHED_OFF = "switched off"

    def __bool__(self) -> bool:
        return self in (Level.FULL, Level.PARTIAL, Level.DEPENDS)


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

CAPABILITIES: Mapping[str, str] = {
    "bfloat16": "compute in bfloat16; `auto` chooses it where it is full",
    "float16": "compute in float16, with loss scaling; `auto` chooses it where it alone is full",
    "collectives": "more than one process",
    "quantized_base": "products with weights of 4 bits (nf4) by bitsandbytes",
    "quantized_base_int8": "products with weights of 8 bits by bitsandbytes",
    "paged_memory": "bitsandbytes' memory that moves between the device and the host by itself",
    "fused_adamw": "torch's fused AdamW by a kernel of the device's own; without it, torch's plain "
    "one updates",
    "adamw_8bit": "bitsandbytes' AdamW with 8-bit state, by a kernel of the device's own",
    "fp8_products": "linear layers that multiply in FP8 while they train: `Backend.fp8_products`",
}
"""Names of the capabilities that the core asks about, and what each means.

A backend answers, not a trial: where a device hands to the host what it has no kernel for, a trial
passes, and every update copies its tensors there and back. All else is read off the facets: what
`Graph.limit`, `Graph.compiler` or `Placement.peak_flops` has not got is None.
"""
