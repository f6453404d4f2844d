from __future__ import annotations

import pytest

from anygauge.config.schema import Precision, PrecisionSection, resolve_precision
from anygauge.interface import FULL, Level, Support, UnsupportedError

LEVELS = {
    "full": FULL,
    "slow": Support(Level.PARTIAL, "emulated"),
    "unknown": Support(Level.DEPENDS, "newer cards have it"),
    "none": Support(Level.UNSUPPORTED_BY_HARDWARE, "too old a card"),
}


def resolve(bfloat16: str, float16: str, **fields: object) -> Precision:
    """What a section becomes where the two types are supported so."""
    levels = {"bfloat16": LEVELS[bfloat16], "float16": LEVELS[float16], "float32": FULL}
    return resolve_precision(PrecisionSection.model_validate(fields), levels.__getitem__)


@pytest.mark.parametrize(
    ("bfloat16", "float16", "chosen"),
    [
        ("full", "full", "bfloat16"),
        ("none", "full", "float16"),
        ("none", "none", "float32"),
        ("unknown", "unknown", "bfloat16"),  # opening the device settles it
        ("slow", "slow", "float32"),  # what works at a price is left to who asks for it
    ],
)
def test_auto(bfloat16: str, float16: str, chosen: str) -> None:
    found = resolve(bfloat16, float16)
    assert (found.param_dtype, found.scales_loss) == (chosen, chosen == "float16")
    assert found.reduce_dtype == "float32"
    assert chosen != "float32" or found.why == "auto: the best of float32"


def test_asked_for_and_slow_is_granted_asked_for_and_unsupported_is_refused() -> None:
    assert resolve("slow", "none", param_dtype="bfloat16").param_dtype == "bfloat16"
    with pytest.raises(UnsupportedError, match="too old a card"):
        resolve("none", "none", param_dtype="bfloat16")


def test_reduction_follows_compute_when_told_to() -> None:
    assert resolve("full", "full", reduce_dtype="param_dtype").reduce_dtype == "bfloat16"


def test_products_in_fp8_are_of_weights_in_bfloat16() -> None:
    assert not resolve("full", "full", param_dtype="bfloat16").fp8
    assert resolve("full", "full", fp8=True).fp8
    for dtype in ("float16", "float32"):
        with pytest.raises(UnsupportedError, match=rf"fp8: weights would be in {dtype} \(asked"):
            resolve("full", "full", param_dtype=dtype, fp8=True)
