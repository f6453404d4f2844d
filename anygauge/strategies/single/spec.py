"""`single` as a plugin; imports no torch."""

from __future__ import annotations

from anygauge.interface import API_VERSION, AutoForm, PlannerHints, StrategySpec

SINGLE = StrategySpec(
    name="single",
    factory="anygauge.strategies.single.engine:Single",
    api_version=API_VERSION,
    summary="One process, one device, plain torch.",
    reference=True,
    single_process=True,
    refuses_fp8=lambda options: "",
    hints=PlannerHints(auto=(AutoForm(place=10),)),
)
