from __future__ import annotations

import pytest

from anygauge.config.schema import Precision, PrecisionSection, resolve_precision
from anygauge.interface import FULL, Level, Support, UnsupportedError

NONE = Support(Level.UNSUPPORTED_BY_HARDWARE, "too old a card")


SLOW = Support(Level.PARTIAL, "emulated")


def resolve(fast: set[str], slow: set[str], **fields: str) -> Precision:
    levels = dict.fromkeys(fast, FULL) | dict.fromkeys(slow, SLOW)
    section = PrecisionSection.model_validate(fields)
    return resolve_precision(section, lambda name: levels.get(name, NONE))


@pytest.mark.parametrize(
    ("fast", "chosen", "scales"),
    [
        ({"float32", "float16", "bfloat16"}, "bfloat16", False),
        ({"float32", "float16"}, "float16", True),
        ({"float32"}, "float32", False),
        (set(), "float32", False),
    ],
)
def test_auto(fast: set[str], chosen: str, scales: bool) -> None:
    found = resolve(fast, set())
    assert (found.param_dtype, found.scales_loss) == (chosen, scales)
    assert found.reduce_dtype == "float32"


def test_asked_for_and_slow_is_granted_asked_for_and_unsupported_is_refused() -> None:
    assert resolve({"float32"}, {"bfloat16"}, param_dtype="bfloat16").param_dtype == "bfloat16"
    with pytest.raises(UnsupportedError, match="too old a card"):
        resolve({"float32"}, set(), param_dtype="bfloat16")


def test_auto_counts_on_what_opening_may_settle() -> None:
    section = PrecisionSection()
    unknown = Support(Level.DEPENDS, "newer cards have it")
    assert resolve_precision(section, lambda name: unknown).param_dtype == "bfloat16"
    known = {"bfloat16": NONE, "float16": FULL}
    assert resolve_precision(section, known.__getitem__).param_dtype == "float16"


def test_auto_leaves_alone_what_works_at_a_price() -> None:
    found = resolve({"float32"}, {"bfloat16", "float16"})
    assert (found.param_dtype, found.why) == ("float32", "auto: the best of float32")


def test_reduction_follows_compute_when_told_to() -> None:
    found = resolve({"float32", "bfloat16"}, set(), reduce_dtype="param_dtype")
    assert found.reduce_dtype == "bfloat16"


def test_products_in_fp8_are_of_weights_in_bfloat16() -> None:
    usual = PrecisionSection(param_dtype="bfloat16")
    assert not resolve_precision(usual, lambda name: FULL).fp8
    assert resolve_precision(PrecisionSection(fp8=True), lambda name: FULL).fp8
    for dtype in ("float16", "float32"):
        section = PrecisionSection(param_dtype=dtype, fp8=True)
        with pytest.raises(UnsupportedError, match=rf"fp8: weights would be in {dtype} \(asked"):
            resolve_precision(section, lambda name: FULL)
