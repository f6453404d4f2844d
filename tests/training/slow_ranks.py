"""Forked ranks whose rank 0 alone is slow: while it loads, writes a checkpoint, and saves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.helpers import forked

SLOW_S = 12.0


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "0":
            print(f"slow: {function.__name__}", flush=True)
            time.sleep(SLOW_S)
        return function(*args, **options)

    return slowly


def slow_once_real(adapt: Callable[..., Any]) -> Callable[..., Any]:
    """Slow for the model itself, not for those without weights that are only looked at."""
    slowly = slow(adapt)

    def adapting(self: Any, model: Any) -> Any:
        on_meta = any(p.is_meta for p in model.parameters())
        return (adapt if on_meta else slowly)(self, model)

    return adapting


if __name__ == "__main__":
    from anygauge.models.factory import CausalModelFactory
    from anygauge.training import save, setup
    from anygauge.training.checkpoints import manager

    with (
        mock.patch.object(setup, "prepare", slow(setup.prepare)),
        mock.patch.object(CausalModelFactory, "adapt", slow_once_real(CausalModelFactory.adapt)),
        mock.patch.object(manager, "write_checkpoint", slow(manager.write_checkpoint)),
        mock.patch.object(save, "save_adapter", slow(save.save_adapter)),
    ):
        forked.main()
