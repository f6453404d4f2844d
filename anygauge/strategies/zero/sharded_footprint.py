"""What a rank holds at each moment under ZeRO-3, and what it sends, by DeepSpeed's own rules.

Terms are those of DeepSpeed's ``runtime/zero`` 0.19: ``stage3.py``, ``partition_parameters.py`` and
``coalesced_collectives.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import HOST_DEVICE, MemoryEstimate, Workload
from anygauge.interface import estimate as at
from anygauge.strategies.shared.footprint import (
    Kinds,
    by_moment,
    item_size,
    scale_bytes,
    sent,
    unique,
)
from anygauge.strategies.shared.materialise import decoder_layers
from anygauge.strategies.zero.deepspeed_config import DEFAULT_LIVE
from anygauge.strategies.zero.footprint import NORM, Terms, of_ranks, replicated_memory
from anygauge.strategies.zero.gather import PERSISTENCE
from anygauge.strategies.zero.options import ZeroOptions

SUB_GROUP = 1_000_000_000
"""Default of ``sub_group_size``: numbers of a rank's part that are updated at once."""
SWAPPED_AT_ONCE = 4
"""Default of ``offload_optimizer.buffer_count``: pinned buffers for what lies on a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """Sizes of a model's weights, in bytes, whole and padded to a multiple of the ranks.

    Attributes:
        parts: of all, that a rank holds.
        resident: of those that stay whole.
        others: of all that do not.
        layer, embedding: of those that do not, the largest of a decoder layer, and the embedding.
        head: the same of the output layer; 0 where it is trained, since it is read at once again.
        trained: whether layers are: frozen ones, read to be recomputed, count among those ahead.
        ahead: that are there at the most before a module fetches what it lacks itself.
        calls: modules that fetch.
    """

    parts: int
    resident: int
    others: int
    layer: int
    embedding: int
    head: int
    trained: bool
    ahead: int
    calls: int

    @classmethod
    def of(cls, terms: Terms) -> _Weights:
        model: Any = terms.size.model
        workload, zero = terms.size.workload, terms.zero
        below = int(zero.get("stage3_param_persistence_threshold", PERSISTENCE))
        live = int(zero.get("stage3_max_live_parameters", DEFAULT_LIVE))
        layers = list(decoder_layers(model))

        def part(parameters: Iterable[nn.Parameter], *, resident: bool) -> int:
            return sum(
                of_ranks(p.numel(), workload.world_size)
                * item_size(p, workload.precision.param_dtype)
                for p in unique(parameters)
                if (p.numel() <= below) is resident
            )

        def passing(module: nn.Module | None) -> int:
            of_all = () if module is None else module.parameters()
            return workload.world_size * part(of_all, resident=False)

        resident = part(model.parameters(), resident=True)
        others = part(model.parameters(), resident=False)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        by_layer = terms.options.gather != "module"  # all of it at once, as a "leaf module"
        modules = [module for layer in layers for module in layer.modules()]
        fetching = layers if by_layer else modules
        return cls(
            parts=resident + others,
            resident=resident * workload.world_size,
            others=others * workload.world_size,
            layer=max(map(passing, layers)),
            embedding=passing(embedding),
            head=passing(head) if head is not None and not head.weight.requires_grad else 0,
            trained=any(p.requires_grad for p in layers[0].parameters() if p.numel() > below),
            ahead=live * terms.size.compute,
            calls=sum(passing(end) > 0 for end in (embedding, head))
            + sum(any(p.numel() > below for p in m.parameters(by_layer)) for m in fetching),
        )

    def whole(self, more: int) -> int:
        """What is whole at once: what was fetched ahead, up to a limit, and what is needed now."""
        return min(self.others, self.ahead + more)


def zero_memory(options: ZeroOptions, workload: Workload) -> MemoryEstimate:
    """What the workload's rank holds and sends, in any stage."""
    terms = Terms.of(options, workload)
    return sharded_memory(terms) if terms.stage == 3 else replicated_memory(terms)


def sharded_memory(terms: Terms) -> MemoryEstimate:
    """Of a run with stage 3.

    From the third micro-batch on DeepSpeed fetches weights ahead, and keeps what is used again
    soon, until so many are whole (``stage3_max_live_parameters``), beside what a module needs.
    """
    size, part, on_host = terms.size, terms.part, terms.on_host
    workload, weights = size.workload, _Weights.of(terms)
    ranks, turns = workload.world_size, workload.accumulation
    params_on_host = terms.options.offload in ("parameters", "both")
    # Numbers updated at once, see ``_create_fp16_sub_groups``: a group ends when it is long enough.
    group = int(terms.zero.get("sub_group_size", SUB_GROUP)) + of_ranks(size.largest, ranks)
    at_once = min(part, group)
    # ``grad_partitions_flat_buffer``, and a bucket as long as the engine lives
    sums, bucket = part * size.reduce, terms.bucket * size.reduce
    here = 0 if params_on_host else weights.parts
    # The second micro-batch of the first step fetches all that it will use in one gather, small
    # weights among it, which stay whole from the first on: they are there twice. The optimizer has
    # no state yet.
    state = 0 if on_host else terms.state
    again = max(0, weights.resident - state) if turns > 1 else 0
    held = {
        at.WEIGHTS: scale_bytes(size.model) + weights.resident + here,
        at.OPTIMIZER: 0 if on_host else terms.masters + terms.state,
        at.BUFFERS: bucket + (0 if on_host else sums),
    }
    outside, emptied = _beside_bucket(terms)
    # The gradient that the embedding's backward makes is in the trace.
    table: Any = size.model
    embedding = [p for p in table.get_input_embeddings().parameters() if p.requires_grad]
    traced = sum(p.numel() for p in embedding) * size.compute

    def having(gathered: int, gradients: int = 0) -> Kinds:
        return {at.GATHERED: gathered, at.GRADIENTS: gradients}

    in_step = {
        # A unit is whole before it is divided; each trained weight, to put its hooks on.
        at.LOAD: having(max(weights.layer, weights.embedding, size.largest * size.compute)),
        at.BEGIN: having(weights.whole(0)),
        at.FORWARD: having(again + weights.whole(weights.layer)),
        at.LOSS: having(again + weights.whole(weights.head + weights.layer if weights.head else 0)),
        at.REDUCE: having(weights.whole(0), emptied),
        at.BACKWARD: having(weights.whole(weights.layer if weights.trained else 0), outside),
        at.END: having(weights.whole(0), outside),
        at.EMBEDDING: having(weights.embedding, max(0, emptied - traced)),
        at.UPDATE: {at.OPTIMIZER: 0 if on_host else terms.updating(at_once)},
        at.EVALUATION: having(weights.whole(weights.layer)),
        at.SAVE: terms.saved,
    }
    always = {at.WEIGHTS: weights.parts if params_on_host else 0}
    host = by_moment(always, 0, {}, {at.UPDATE: {}, at.SAVE: size.saved}) if params_on_host else {}
    if on_host:
        swapped = SWAPPED_AT_ONCE * at_once * size.master
        there = {
            **always,
            # A gradient in float32 for each, and the partitions' sums.
            at.GRADIENTS: part * size.master + sums,
            at.BUFFERS: 0 if terms.options.nvme is None else swapped,
        }
        copied = at_once * size.compute + terms.made(at_once)
        host = terms.on_the_host(there, {at.BUFFERS: copied})
    # Weights are gathered in each micro-batch, resident ones after the update.
    everyone, gathered = range(ranks), turns * 2 * weights.others
    gathers = turns * 2 * weights.calls + (1 if weights.resident else 0)
    reduced = sum(of_ranks(p.numel(), ranks) * ranks for p in size.parameters)
    reductions = turns * of_ranks(reduced, max(1, terms.bucket))
    # Sums on the host go to the device and back in each micro-batch, and there again at its end.
    each = 2 * turns * size.reduce + size.master + size.compute
    moved = float(part * each) if on_host else 0.0
    # Gathered weights are copied out of what they came in; gradients into the bucket and by ranks.
    gradients = turns * size.trained * (size.compute + 6.0 * size.reduce)
    return MemoryEstimate(
        device=by_moment(held, 0 if on_host else terms.masters, {}, in_step),
        host={at.SAVE: size.saved, **host},
        traffic=(
            *sent("all_gather", everyone, gathers, gathered + weights.resident),
            *sent("reduce_scatter", everyone, reductions, turns * reduced * size.reduce),
        ),
        host_bytes=terms.updated if on_host else 0.0,
        copied_bytes=moved + (gathered / ranks if params_on_host else 0.0),
        other_bytes=2.0 * gathered + gradients + (0.0 if on_host else terms.updated),
    )


def _beside_bucket(terms: Terms) -> tuple[int, int]:
    """Bytes of gradients beside the bucket: while backward makes them, and when it is emptied.

    One that does not fit lies outside, see ``__add_grad_to_ipg_bucket``. What is reduced is laid
    out by ranks in a tensor of its own (``reduce_scatter_coalesced``).
    """
    size = terms.size
    outside = size.largest * size.compute if size.largest > terms.bucket else 0
    at_once = min(max(terms.bucket, size.largest), size.trained)
    emptied = at_once * size.reduce
    if outside:
        emptied += outside + size.largest * terms.widened
    if size.workload.backend.device_type == HOST_DEVICE:
        emptied += at_once * size.reduce  # gloo copies what goes into ``_reduce_scatter_base``
    if terms.on_host:
        # Sums are brought back for their norm, see ``partition_grads``.
        emptied += of_ranks(size.largest, size.workload.world_size) * (size.reduce + NORM)
    return outside, emptied
