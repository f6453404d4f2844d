"""What a rank holds and sends under tensor parallelism, counted from the model."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from anygauge.interface import HeldLayers, MemoryEstimate, Workload
from anygauge.interface import estimate as at
from anygauge.strategies.context.context_parallel import group_ranks
from anygauge.strategies.shared.common import trained_parameters
from anygauge.strategies.shared.degrees import Degrees
from anygauge.strategies.shared.footprint import Sizes, add_kinds, item_bytes, rows_of, transfer
from anygauge.strategies.shared.materialize import causal_of
from anygauge.strategies.shared.tensor_plans import all_positions_after
from anygauge.strategies.tensor.division import DividedLayer, Division, divide, partial_gradients

NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""What layers call a norm that comes after their last block."""


def tensor_memory(
    options: Degrees,
    workload: Workload,
    plain: Callable[[Workload], MemoryEstimate],
    ranks: int = 1,
) -> MemoryEstimate:
    """What a rank holds and sends that has a part of each layer, as large as the first rank's.

    Args:
        plain: of a job of the ranks that have the same part, whose model is that part.
        ranks: that divide the rows of each of the parts, under FSDP.
    """
    whole, (place, index) = Sizes.of(workload), divmod(workload.rank, options.tp)
    model = copy.deepcopy(whole.model)
    division = divide(model, options.tp, 0)
    world_size = workload.world_size // options.tp
    found = plain(dataclasses.replace(workload, skeleton=model, world_size=world_size, rank=place))
    stages = found.stages or (HeldLayers(0, len(division.layers)),)
    held = {id(p) for stage in stages for p in _parameters(model, division, stage)}
    trained = trained_parameters(model)
    partial = partial_gradients(model, division, options, [name for name, _ in trained])
    sums = whole.reduce * sum(
        rows_of(p, ranks)
        for (_, p), part in zip(trained, partial, strict=True)
        if part and id(p) in held
    )
    group = group_ranks(workload.rank, options.tp)
    unit, calls = tensor_calls(options, workload, model, division, stages)
    # `TensorParts.gather`: the parts of all ranks, and what is put together of them.
    kept = found.device[at.SAVE]
    saved = max(kept.get(at.SAVED, 0), 2 * whole.largest * whole.master)
    # `sum_at`: partial gradients are put into one message, which then takes their place, before an
    # optimizer makes anything.
    update = found.device[at.UPDATE]
    made = update.get(at.OPTIMIZER, 0) - kept.get(at.OPTIMIZER, 0)
    # One message of stages that have replicas is gone when another is made.
    other = update[at.GRADIENTS] - found.device[at.END][at.GRADIENTS] if found.stages else 0
    message = {at.GRADIENTS: max(0, sums - made - other)}
    beside = [
        dataclasses.replace(one, group=tuple(each * options.tp + index for each in one.group))
        for one in found.traffic
    ]
    return dataclasses.replace(
        found,
        device={
            **found.device,
            at.SAVE: {**kept, at.SAVED: saved},
            at.UPDATE: add_kinds(update, message),
        },
        host={**found.host, at.SAVE: {**found.host.get(at.SAVE, {}), **whole.to_save}},
        traffic=(
            *beside,
            *(t for c, n in calls.items() for t in transfer(c, group, n, n * unit, waited=True)),
            *transfer("all_reduce", group, 1, sums, waited=True),
        ),
    )


@dataclass
class Passes:
    """Counts for one micro-batch: entries of blocks and ends of rows that are passed, each way.

    A gradient flows back through those alone behind which something is trained.
    """

    entries: int = 0
    rows: int = 0
    back_entries: int = 0
    back_rows: int = 0
    flows: bool = False

    def add_layer(self, layer: DividedLayer, recomputes: bool, parts: bool) -> None:
        """Add one layer's; `parts`: between blocks a rank has its part of the positions."""
        blocks = list(_blocks(layer, parts))
        entries, rows = sum(begins for begins, _, _ in blocks), sum(ends for _, ends, _ in blocks)
        # Recomputation ends when backward has what it needs: before the last sum, unless a norm
        # or a block follows it.
        norm = any(hasattr(layer.module, name) for name in NORMS_AFTER)
        follows = norm or all(not ends for _, ends, _ in blocks[-1:])
        again = rows if follows else rows - 1
        self.entries += entries * (2 if recomputes else 1)
        self.rows += rows + (again if recomputes else 0)
        inner = {id(p) for _, _, parameters in blocks for p in parameters}
        around = [p for p in layer.module.parameters() if id(p) not in inner]
        self.flows = self.flows or any(p.requires_grad for p in around)
        before = self.flows
        for begins, ends, parameters in blocks:
            self.back_entries += begins if (before if _is_parallel(layer) else self.flows) else 0
            self.flows = self.flows or any(p.requires_grad for p in parameters)
            self.back_rows += ends if self.flows else 0


def _is_parallel(layer: DividedLayer) -> bool:
    """Whether all blocks of a layer have the layer's own input."""
    norms = [m for m in layer.module.children() if "norm" in type(m).__name__.lower()]
    alone: bool = getattr(layer.module, "use_parallel_residual", len(norms) < len(layer.entries))
    return alone


def _blocks(layer: DividedLayer, parts: bool) -> Iterator[tuple[int, int, list[nn.Parameter]]]:
    """(Entries, rows, parameters) of each block, in the order of the layer."""
    within: set[int] = set()
    entries, whole = ({id(block) for block in each} for each in (layer.entries, layer.whole))
    for block in layer.module.modules():
        if id(block) in whole:
            yield int(parts), 0, list(block.parameters())
        if id(block) not in entries:
            continue
        modules = {id(module) for module in block.modules()}
        within |= modules
        yield 1, sum(id(row) in modules for row in layer.rows), list(block.parameters())
    for row in layer.rows:
        if id(row) not in within:
            yield 0, 1, list(row.parameters())


def tensor_calls(
    options: Degrees,
    workload: Workload,
    model: nn.Module,
    division: Division,
    stages: Sequence[HeldLayers],
) -> tuple[int, dict[str, int]]:
    """Bytes of the hidden states of all positions, and how often they are sent in a step."""
    length = math.ceil(workload.length / options.tp) * options.tp
    config = causal_of(model).config
    width = config.get_text_config().hidden_size
    unit = workload.micro_batch * length * width * item_bytes(workload.precision.param_dtype)
    embedding_is_trained = any(
        p.requires_grad for p in causal_of(model).get_input_embeddings().parameters()
    )
    times = Counter[str]()
    for stage in stages:
        first, last = stage.first == 0, stage.end == len(division.layers)
        # A stage's backward goes on to the stage before; see `Stage` for the first one.
        alone = not any(p.requires_grad for p in _parameters(model, division, stage)) and not last
        flows = not first or alone or embedding_is_trained
        embedded = first and division.embedding is not None
        passes = Passes(flows=flows)
        for index in range(stage.first, stage.end):
            recomputes = workload.activations.recomputes(index)
            passes.add_layer(division.layers[index], recomputes, options.sequence_parallel)
        if options.sequence_parallel:
            rejoined = last and all_positions_after(config) is not None
            times["all_gather"] += passes.entries + passes.back_rows + 2 * rejoined
            times["all_gather"] += embedded and flows
            times["reduce_scatter"] += passes.rows + passes.back_entries
            times["all_reduce"] += embedded
        else:
            times["all_gather"] += last and passes.flows
            times["all_reduce"] += embedded + passes.rows + passes.back_entries
    return unit, {name: n * workload.accumulation for name, n in times.items() if n}


def _parameters(model: nn.Module, division: Division, stage: HeldLayers) -> Iterator[nn.Parameter]:
    """Select those of some layers; of the first, the embedding's too; of the last, the rest."""
    for layer in division.layers[stage.first : stage.end]:
        yield from layer.module.parameters()
    embedding = list(causal_of(model).get_input_embeddings().parameters())
    if stage.first == 0:
        yield from embedding
    if stage.end == len(division.layers):
        head = causal_of(model).get_output_embeddings().parameters()
        others = {id(p) for p in embedding} - {id(p) for p in head}
        others |= {id(p) for layer in division.layers for p in layer.module.parameters()}
        yield from (p for p in model.parameters() if id(p) not in others)
