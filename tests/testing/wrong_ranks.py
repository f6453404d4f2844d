"""Wrong backends that checks of the kit's part `ranks` find: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant


@mutant("gathers into a buffer backwards", part="ranks", check="buffers", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        work = usual(output, mine, *args, **kwargs)
        output.copy_(output.flip(0))
        return work
