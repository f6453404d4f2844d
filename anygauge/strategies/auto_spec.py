"""`auto` as a plugin; it imports no torch."""

from __future__ import annotations

from anygauge.interface import API_VERSION, Level, Requirement, StrategySpec, Support

_LATER = Support(
    Level.NOT_WRITTEN_YET, "strategy auto decides when kernels have been chosen already"
)

AUTO = StrategySpec(
    name="auto",
    factory="anygauge.strategies.auto:Auto",
    api_version=API_VERSION,
    summary="The fastest of the others that fits the devices' memory.",
    needs=(Requirement(capability="collectives", because="it may become one that needs them"),),
    takes_clip_kernel=lambda options: _LATER,
    takes_update_kernel=lambda options: _LATER,
)
