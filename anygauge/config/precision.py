"""The precision policy of a run: which type each kind of number has.

One object says it for every strategy, so that two of them can be compared at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anygauge.config.schema import PrecisionSection
from anygauge.interface import Support, UnsupportedError

AUTO_ORDER = ("bfloat16", "float16", "float32")
"""What ``auto`` tries: bfloat16 needs no loss scaling, so it comes before float16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Names of torch types.

    Attributes:
        compute: weights and adapter in memory, and arithmetic.
        reduce: accumulation and reduction of gradients.
        master: the optimizer's copy of trained weights, and its moments.
        why: how `compute` was settled, in words.
    """

    compute: str
    reduce: str
    master: str = "float32"
    why: str = "asked for"

    @property
    def scales_loss(self) -> bool:
        """float16 underflows without loss scaling."""
        return self.compute == "float16"


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
