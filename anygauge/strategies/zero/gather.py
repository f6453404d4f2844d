"""Who shards frozen weights in stage 3: `FlatLayers`, or DeepSpeed.

For factors that stay whole, stages 1 and 3 do the same: masters and state are sharded, and what was
updated is gathered once a step. The rest of stage 3 serves frozen weights, one parameter at a time.
So where `FlatLayers` can gather these, DeepSpeed has what is trained at stage 1, or at stage 2 if
its optimizer is offloaded: there, gradients move to the host as they come.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anygauge.interface import UnsupportedError, Workload
from anygauge.strategies.shared.common import trained_parameters
from anygauge.strategies.shared.flat import flat_layers_fit
from anygauge.strategies.shared.materialise import decoder_layers
from anygauge.strategies.zero.deepspeed_versions import offloads_gradients
from anygauge.strategies.zero.options import ZeroOptions

PERSISTENCE = 100_000
"""DeepSpeed's default of ``stage3_param_persistence_threshold``: numbers of what stays whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What DeepSpeed's settings depend on, in elements.

    Attributes:
        trained: of all trained tensors.
        largest_factor: of an adapter's trained factors; 0 without an adapter.
        largest_block: parameters of the largest decoder layer.
        why_not_flat: what of the model keeps its frozen layers from being gathered flat; "": they
            can be.
    """

    trained: int
    largest_factor: int
    largest_block: int
    why_not_flat: str = ""

    @classmethod
    def of(cls, adapted: nn.Module) -> ModelSizes:
        """Measure an adapted model, real or on the meta device."""
        trained = trained_parameters(adapted)
        # peft's names; other weights may be trained too, far too large to stay resident.
        factors = [p.numel() for name, p in trained if ".lora_" in name]
        others = [p.numel() for name, p in trained if ".lora_" not in name]
        blocks = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(adapted)]
        why = ""
        if not flat_layers_fit(adapted):
            why = "its decoder layers are not frozen weights of their own, with an adapter beside"
        elif max(others, default=0) > PERSISTENCE:
            why = "it trains weights that are larger than an adapter's, which stage 3 shards"
        return cls(
            trained=sum(factors) + sum(others),
            largest_factor=max(factors, default=0),
            largest_block=max(blocks, default=0),
            why_not_flat=why,
        )


def why_not_flat(options: ZeroOptions, workload: Workload, sizes: ModelSizes | None) -> str:
    """What keeps a run of stage 3 from gathering frozen layers flat; "" where they are.

    Args:
        sizes: None before the model is known, which may keep it as well.
    """
    graph = workload.backend.graph
    reasons = {
        f"strategy.gather is {options.gather}": options.gather in ("layer", "module"),
        "there is one rank": workload.world_size == 1,
        "strategy.options sets fields of DeepSpeed's own gathering": bool(options.options),
        "strategy.nvme needs DeepSpeed's stage 3": options.nvme is not None,
        "strategy.offload keeps weights on the host": options.offload in ("parameters", "both"),
        "this DeepSpeed's stage 2 does not add up gradients that it offloads": (
            options.offload == "optimizer" and not offloads_gradients()
        ),
        "the adapter begins with values that whole weights give": (
            workload.adapter in ("dora", "taken")
        ),
        "layers are compiled": graph.compiler is not None,
        "it was not tried on a device that accumulates a graph": graph.accumulates,
    }
    of_model = "" if sizes is None else sizes.why_not_flat
    return next((reason for reason, holds in reasons.items() if holds), of_model)


def stage_of(options: ZeroOptions, workload: Workload, sizes: ModelSizes | None) -> int:
    """The stage that DeepSpeed has.

    Args:
        sizes: None before the model is known: that of the run file.

    Raises:
        UnsupportedError: layers are to be gathered flat, and cannot be.
    """
    if options.stage < 3 or sizes is None:
        return options.stage
    why = why_not_flat(options, workload, sizes)
    if not why:
        return 1 if options.offload == "none" else 2
    if options.gather == "flat":
        raise UnsupportedError(
            f"strategy.gather: flat: layers cannot be gathered flat: {why}. Leave it out"
        )
    return 3
