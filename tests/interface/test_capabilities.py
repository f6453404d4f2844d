"""The capabilities of the contract are those that the core asks for: no more, no fewer."""

from __future__ import annotations

from anygauge.config.precision import AUTO_ORDER
from anygauge.interface import CAPABILITIES
from anygauge.strategies.facts import FACTS


def test_each_is_asked_for_and_no_other() -> None:
    of_strategies = {need.capability for facts in FACTS.values() for need in facts.needs}
    of_precision = set(AUTO_ORDER) - {"float32"}
    assert of_strategies | of_precision == set(CAPABILITIES)


def test_no_strategy_is_one() -> None:
    assert not set(CAPABILITIES) & set(FACTS)
