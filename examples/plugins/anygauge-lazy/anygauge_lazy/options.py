"""The run file's ``backend_options`` for lazy tensors."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from anygauge.interface import Options

DEFAULT_LIMIT = 1000
"""Operations: a forward pass of a small model fits, a whole step does not."""


class LazyOptions(Options):
    """Options of the lazy backend."""

    graph_limit: Annotated[int, Field(ge=1)] = Field(
        DEFAULT_LIMIT, description="Operations in one graph."
    )
