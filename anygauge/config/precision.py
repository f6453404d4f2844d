"""Settles the precision policy of a run: which type each kind of number has."""

from __future__ import annotations

from collections.abc import Callable

from anygauge.config.schema import PrecisionSection
from anygauge.interface import Support, UnsupportedError
from anygauge.interface.strategy import Precision

AUTO_ORDER = ("bfloat16", "float16", "float32")
"""What ``auto`` tries: bfloat16 needs no loss scaling, so it comes before float16."""


def resolve_precision(
    section: PrecisionSection,
    fast: frozenset[str],
    support: Callable[[str], Support],
) -> Precision:
    """Settle ``auto``, and refuse a type that the device cannot compute in.

    Args:
        fast: types that the opened device is fast in (`Placement.dtypes`).
        support: a backend's capability look-up.

    Raises:
        UnsupportedError: the asked type is unsupported; quotes the capability's reason.
    """
    compute: str = section.compute
    why = "asked for"
    if compute == "auto":
        compute = next(name for name in AUTO_ORDER if name in fast)
        why = "auto: the best of " + ", ".join(sorted(fast))
    elif compute != "float32" and not support(compute):
        raise UnsupportedError(
            f"precision.compute: {compute!r} on this device: {support(compute)}; fast here: "
            f"{', '.join(sorted(fast))}. Use one of these, or auto."
        )
    return Precision(
        compute=compute, reduce=compute if section.reduce == "compute" else "float32", why=why
    )
