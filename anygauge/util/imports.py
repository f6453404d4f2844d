"""Packages that libraries import wherever they are installed, whether a run uses them or not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence

FEW_BITS = "bitsandbytes"
"""PEFT imports it, and with it torch's compiler."""
TRACKER = "mlflow"
"""DeepSpeed's tuner does the same with it."""


def unused(*, few_bits: bool, trackers: Collection[str]) -> list[str]:
    """Those that a run does not use.

    Args:
        few_bits: its weights or its optimizer's state are quantised.
        trackers: any of which may use it.
    """
    wanted = {FEW_BITS: few_bits, TRACKER: bool(trackers)}
    return [name for name, is_used in wanted.items() if not is_used]


@contextlib.contextmanager
def hidden(names: Sequence[str]) -> Iterator[None]:
    """Within it, libraries do not find these packages; afterwards they can be imported again."""
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]
