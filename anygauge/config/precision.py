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
    compute: str = section.compute
    why = "asked for"
    good = (Level.FULL, Level.DEPENDS)
    fast = [name for name in AUTO_ORDER if name == "float32" or support(name).level in good]
    if compute == "auto":
        compute = fast[0]
        why = "auto: the best of " + ", ".join(sorted(fast))
    elif compute != "float32" and not support(compute):
        raise UnsupportedError(
            f"precision.compute: {compute!r} on this device: {support(compute)}; fast here: "
            f"{', '.join(sorted(fast))}. Use one of these, or auto."
        )
    return Precision(
        compute=compute, reduce=compute if section.reduce == "compute" else "float32", why=why
    )
