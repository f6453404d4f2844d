"""Wrong backends that checks of the kit's part `device` find: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant, torch


@mutant("autocast lowers float32, too", part="device", check="autocast_casts", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.autocast")
    def autocast(self: Any, usual: Any, dtype: Any) -> Any:
        return usual(torch.bfloat16)
