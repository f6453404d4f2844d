"""What a run file says of `zero`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.interface import Options


class ZeroOptions(Options):
    """Fields of ``strategy`` other than its name."""

    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        3,
        description="What is sharded. 0: nothing; 1: optimizer state; 2: also gradients; 3: also "
        "weights.",
    )
    gather: Literal["auto", "flat", "layer", "module"] = Field(
        "auto",
        description="Stage 3: how frozen weights are gathered. flat: each decoder layer from flat "
        "pieces, in place; layer or module: by DeepSpeed, a decoder layer or a module at a time; "
        "auto: flat where it can be, else layer.",
    )
    offload: Literal["none", "optimizer", "parameters", "both"] = Field(
        "none",
        description="What to keep in the host's memory between uses; parameters and both need "
        "stage 3.",
    )
    nvme: str | None = Field(
        None,
        description="With offload: optimizer in stage 3, a folder on a local disk of each machine "
        "to keep the optimizer in, instead of in the host's memory.",
    )
    reentrant: bool = Field(
        False,
        description="Recompute layers by torch's reentrant form, also where DeepSpeed does not "
        "need it. Some devices need it.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of DeepSpeed's zero_optimization that win over ours.",
    )
