"""The run file's ``backend_options`` for NVIDIA GPUs."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from anygauge.interface import Options


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)*", text):
        raise ValueError("is not a version, such as '1.6'")
    return text


class CudaOptions(Options):
    """Options of the cuda backend."""

    ofi_nccl_version: Annotated[str, AfterValidator(_version)] | None = Field(
        None,
        description="The version of the aws-ofi-nccl plugin on EFA, in quotes, where it is older "
        "than 1.7.",
    )
    pad_to_multiple_of: Annotated[int, Field(ge=1)] = Field(
        64,
        description="Round the width of each batch up to a multiple of so many tokens: cuDNN's "
        "attention builds a plan for each new width, in more than half a second.",
    )
