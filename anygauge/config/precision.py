"""Settles the precision policy of a run: which type each kind of number has."""

from __future__ import annotations

from collections.abc import Callable

from anygauge.config.schema import PrecisionSection
from anygauge.interface import Level, Support, UnsupportedError
from anygauge.interface.strategy import Precision

AUTO_ORDER = ("bfloat16", "float16", "float32")
"""What ``auto`` tries: bfloat16 needs no loss scaling, so it comes before float16."""


def resolve_precision(section: PrecisionSection, support: Callable[[str], Support]) -> Precision:
    """Settle ``auto``, and refuse a type that the device cannot compute in.

    Args:
        support: a backend's capability look-up. ``auto`` chooses among the types that are full, or
            may turn out to be once a device is open.

    Raises:
        UnsupportedError: the asked type is unsupported; quotes the capability's reason.
    """
    param_dtype: str = section.param_dtype
    why = "asked for"
    good = (Level.FULL, Level.DEPENDS)
    fast = [name for name in AUTO_ORDER if name == "float32" or support(name).level in good]
    if param_dtype == "auto":
        param_dtype = fast[0]
        why = "auto: the best of " + ", ".join(sorted(fast))
    elif param_dtype != "float32" and not support(param_dtype):
        raise UnsupportedError(
            f"precision.param_dtype: {param_dtype!r} on this device: {support(param_dtype)}; "
            f"fast here: {', '.join(sorted(fast))}. Use one of these, or auto."
        )
    reduced = section.reduce_dtype
    return Precision(
        param_dtype=param_dtype,
        reduce_dtype=param_dtype if reduced == "param_dtype" else reduced,
        why=why,
    )
