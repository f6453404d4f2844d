"""What a run file says of `fsdp`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anygauge.strategies.shared.degrees import Degrees


class FsdpOptions(Degrees):
    """Fields of ``strategy`` other than its name."""

    dp_replicate: Annotated[int, Field(ge=1)] = Field(
        1, description="Number of groups of ranks that each hold a whole model; above 1: HSDP."
    )
    dp_shard: Annotated[int, Field(ge=-1)] = Field(
        -1, description="The model is sharded over dp_shard x cp ranks; -1: over all that are left."
    )
    gather: Literal["auto", "flat", "layer", "step"] = Field(
        "auto",
        description="How weights are gathered. flat: frozen ones of each decoder layer from flat "
        "pieces, in place; layer: by FSDP2, for each layer's forward and backward; step: once a "
        "step; auto: flat where it can be, else layer.",
    )
    offload: Literal["none", "both"] = Field(
        "none", description="both: weights and optimizer lie in the host's memory between uses."
    )
