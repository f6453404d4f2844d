"""The run file's ``backend_options`` for NVIDIA GPUs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from anygauge.interface import Options


class CudaOptions(Options):
    """Options of the cuda backend."""

    pad_to_multiple_of: Annotated[int, Field(ge=1)] = Field(
        64,
        description="Round the width of each batch up to a multiple of so many tokens: cuDNN's "
        "attention builds a plan for each new width, in more than half a second.",
    )
