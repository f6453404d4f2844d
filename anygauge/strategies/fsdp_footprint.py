"""What a rank holds and sends under FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from anygauge.interface.strategy import Footprint, Workload
from anygauge.strategies.flat import flat_lengths, gathered_in_a_turn
from anygauge.strategies.footprint import item_bytes, item_size, rows_of, scale_bytes
from anygauge.strategies.fsdp_options import FsdpOptions
from anygauge.strategies.materialise import decoder_layers


def fsdp_footprint(
    options: FsdpOptions, ranks: int, workload: Workload, *, flat: bool
) -> Footprint:
    """See `Strategy.footprint`; of the first rank, whose parts are the largest.

    Args:
        ranks: that hold the model together.
        flat: frozen layers are gathered by `FlatLayers`.
    """
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "a footprint is counted from the model"
    everything = list({id(p): p for p in model.parameters()}.values())
    trained = [p for p in everything if p.requires_grad]
    all_trained = len(trained) == len(everything)
    dtype, reduce = precision.param_dtype, item_bytes(precision.reduce_dtype)
    master = item_bytes(precision.master_dtype)
    layers = {id(p): p for layer in decoder_layers(model) for p in layer.parameters()}
    in_layers = _padded(layers.values(), ranks, dtype)
    in_root = _padded((p for p in everything if id(p) not in layers), ranks, dtype)
    part = sum(map(lambda p: rows_of(p, ranks), trained))
    frozen = sum(rows_of(p, ranks) * item_size(p, dtype) for p in everything if not p.requires_grad)
    turns = workload.accumulation
    once = options.gather == "step"
    gathers = in_layers + in_root if once else turns * (2 * in_layers + in_root)
    if flat:
        lengths = flat_lengths(model, ranks)
        gathers = gathered_in_a_turn(lengths) * item_bytes(dtype) + _padded(trained, ranks, dtype)
        gathers *= turns
        whole = [p for p in everything if id(p) not in layers and not p.requires_grad]
        frozen = sum(lengths) // ranks * item_bytes(dtype)
        frozen += sum(p.numel() * item_size(p, dtype) for p in whole)
    reductions = turns if all_trained else 1
    sums = reductions * _padded(trained, ranks, precision.reduce_dtype)
    sent = {"all_gather": gathers, "reduce_scatter": sums} if ranks > 1 else {}
    if options.dp_replicate > 1:
        sent["all_reduce"] = sums // ranks
    return Footprint(
        weights=frozen + part * master + scale_bytes(model),
        gradients=part * master if all_trained else sum(p.numel() for p in trained) * reduce,
        masters=0,
        optimizer=round(part * workload.state_bytes),
        sent=sent,
    )


def _padded(parameters: Iterable[nn.Parameter], ranks: int, dtype: str) -> int:
    """Bytes of parameters in a type, whose rows are made a multiple of the ranks."""
    return sum(rows_of(p, ranks) * ranks * item_size(p, dtype) for p in parameters)
