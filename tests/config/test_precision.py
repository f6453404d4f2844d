from __future__ import annotations

import pytest

from anygauge.config.precision import resolve_precision
from anygauge.config.schema import PrecisionSection
from anygauge.interface import FULL, Level, Support, UnsupportedError

NONE = Support(Level.UNSUPPORTED_BY_HARDWARE, "too old a card")


def resolve(fast: set[str], supported: set[str], **fields: str) -> object:
    section = PrecisionSection.model_validate(fields)
    return resolve_precision(
        section, frozenset(fast), lambda name: FULL if name in supported else NONE
    )


@pytest.mark.parametrize(
    ("fast", "chosen", "scales"),
    [
        ({"float32", "float16", "bfloat16"}, "bfloat16", False),
        ({"float32", "float16"}, "float16", True),
        ({"float32"}, "float32", False),
    ],
)
def test_auto(fast: set[str], chosen: str, scales: bool) -> None:
    found = resolve(fast, fast)
    assert (found.compute, found.scales_loss) == (chosen, scales)  # type: ignore[attr-defined]
    assert (found.reduce, found.master) == ("float32", "float32")  # type: ignore[attr-defined]


def test_asked_for_and_slow_is_granted_asked_for_and_unsupported_is_refused() -> None:
    assert resolve({"float32"}, {"bfloat16"}, compute="bfloat16").compute == "bfloat16"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="too old a card"):
        resolve({"float32"}, set(), compute="bfloat16")


def test_reduction_follows_compute_when_told_to() -> None:
    found = resolve({"float32", "bfloat16"}, set(), reduce="compute")
    assert found.reduce == "bfloat16"  # type: ignore[attr-defined]
