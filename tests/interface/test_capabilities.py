"""The capabilities of the contract are those that the core asks for: no more, no fewer."""

from __future__ import annotations

from anygauge.config.schema import AUTO_ORDER
from anygauge.interface import CAPABILITIES
from anygauge.registry import Registry
from anygauge.training.build_strategy import FP8, FUSED_ADAMW, QUANTIZED
from anygauge.training.optimizers import EIGHT_BIT, PAGED_MEMORY


def test_each_is_asked_for_and_no_other() -> None:
    strategies = (provided.spec for provided in Registry.load().strategies)
    of_strategies = {need for spec in strategies for need in spec.needs}
    of_precision = set(AUTO_ORDER) - {"float32"}
    of_sections = {*QUANTIZED.values(), PAGED_MEMORY, EIGHT_BIT, FUSED_ADAMW, FP8}
    assert of_strategies | of_precision | of_sections == set(CAPABILITIES)
