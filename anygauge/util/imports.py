"""Packages that libraries import wherever they are installed, whether a run uses them or not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def unused_hidden(*, few_bits: bool, trackers: Collection[str]) -> Iterator[None]:
    """Within it, libraries do not find what a run does not use; afterwards all can be imported.

    Args:
        few_bits: the run's weights or its optimizer's state are quantised. Otherwise bitsandbytes
            is hidden, which PEFT imports, and with it torch's compiler.
        trackers: any of which may use mlflow. DeepSpeed's tuner does the same with that.
    """
    names = [n for n, used in (("bitsandbytes", few_bits), ("mlflow", trackers)) if not used]
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]
