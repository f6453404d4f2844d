"""What a run file says of `plain`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from anygauge.interface import Options


class PlainOptions(Options):
    """Fields of ``strategy`` other than its name."""

    sums: Literal["float32", "float64"] = Field(
        "float32", description="Type in which gradients of micro-batches are added up."
    )
