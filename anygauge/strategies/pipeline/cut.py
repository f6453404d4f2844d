"""Where a pipeline is cut: parts of nearly equal cost, and which ranks have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from anygauge.strategies.shared.degrees import Degrees, stages_per_rank
from anygauge.strategies.shared.footprint import numbers
from anygauge.strategies.shared.materialise import causal_of, decoder_layers, decoder_of


@dataclass(frozen=True, slots=True)
class StagePart:
    """Stage `index` of `count`: decoder layers from `first` to before `end`."""

    index: int
    count: int
    first: int
    end: int

    @property
    def begins(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def ends(self) -> bool:
        """Whether it has the output layer, and makes the loss."""
        return self.index == self.count - 1


def stage_parts(model: nn.Module, options: Degrees) -> list[StagePart]:
    """The stages of an adapted model, cut so that the costliest costs least.

    A layer costs what its matrices do, in operations a token: as many as it has numbers, times a
    factor that is the same for all. The output layer belongs to the last stage; to look up an
    embedding costs nothing.
    """
    causal = causal_of(model)
    layers = list(decoder_layers(decoder_of(causal)))
    costs = [numbers(layer.parameters()) for layer in layers]
    head = causal.get_output_embeddings()
    last = 0 if head is None else numbers(head.parameters())
    count = options.pp * stages_per_rank(options)
    ends = cut(costs, count, last)
    return [
        StagePart(index, count, first, end)
        for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def cut(costs: Sequence[int], count: int, last: int = 0) -> list[int]:
    """Where each of `count` neighbouring parts ends, none of them empty.

    The largest sum of costs is the least that there is; of equal ones, the first part is smallest.

    Args:
        last: added to the last part.
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n]: (largest cost, ends) of the first n items in as many parts as were made so far.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for part in range(1, count + 1):
        extra = last if part == count else 0
        found: dict[int, tuple[int, list[int]]] = {}
        for end in range(part, len(costs) - (count - part) + 1):
            options = [
                (max(worst, total[end] - total[start] + extra), [*ends, end])
                for start, (worst, ends) in best.items()
                if start < end
            ]
            if options:
                found[end] = min(options)
        best = found
    return best[len(costs)][1]


def rank_of_stage(index: int, options: Degrees) -> int:
    """The place in its pipeline of the rank that has a stage."""
    turn, place = divmod(index, options.pp)
    # Of a zero-bubble schedule the second half goes back: the first rank has both ends.
    backwards = options.schedule == "zero_bubble" and turn % 2 == 1
    return options.pp - 1 - place if backwards else place


def stages_at(stages: Sequence[StagePart], options: Degrees, place: int) -> list[StagePart]:
    """Those of the rank at a place in its pipeline."""
    return [part for part in stages if rank_of_stage(part.index, options) == place]
