"""Frozen weights of decoder layers, of which each rank holds a flat piece, gathered in place.

A layer's pieces come together in one of two buffers, the layers taking turns. Its parameters are
views of that buffer, once and for all: nothing is allocated, copied or set in a step. While a layer
computes, the next one's weights are under way; two layers that are there already are not gathered
again. A frozen weight has no gradient, so that this is all there is to it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anygauge.interface import UnsupportedError
from anygauge.strategies.shared.materialize import decoder_layers

ALIGNED = 64
"""Elements: where a parameter begins in its layer's piece, kernels read it fastest."""
BUFFERS = 2
CHECKED_PASSES = 2
"""After so many, the model's calls are known to be what they should."""
FLAT = "flat_layers"
"""Attribute of a model that has them."""
SMALL_PART = 1 / 4
"""Of the layers' parameters, at most, are trained: more are better sharded by layer."""


class FlatLayers:
    """The frozen weights of a model's decoder layers.

    Args:
        model: on meta; its frozen parameters are of one type. Those of its layers become real.
        group: ranks that together hold each piece once.
        otherwise: the ``strategy.gather`` of a model that computes outside of its layers' forward.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        otherwise: str,
    ) -> None:
        self._group, self._otherwise = group, otherwise
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        layers = list(decoder_layers(model))
        frozen = [_frozen_of(layer) for layer in layers]
        dtype = frozen[0][0].dtype
        self._lengths = [_piece(of_layer, ranks) for of_layer in frozen]
        self._pieces = [torch.zeros(n, dtype=dtype, device=device) for n in self._lengths]
        longest = max(self._lengths) * ranks
        self._buffers = [torch.empty(longest, dtype=dtype, device=device) for _ in range(BUFFERS)]
        self._wholes = [
            self._buffers[index % BUFFERS][: length * ranks]
            for index, length in enumerate(self._lengths)
        ]
        self._held: list[int | None] = [None] * BUFFERS
        self._handles: list[Any] = [None] * BUFFERS
        self._backward = False
        self._lists = _numbers_of_lists(model, layers)
        self._places: dict[int, tuple[int, int]] = {}  # its layer, and where it begins in it
        self._inside: set[int] = set()
        self._passes = 0
        self._checks: list[Any] = []
        for index, layer in enumerate(layers):
            self._make_views(index, layer)
            for name, module in layer.named_modules(prefix=f"layer {index}"):
                if module is not layer and any(p in self for p in module.parameters(False)):
                    check = functools.partial(self._check, index, name)
                    self._checks.append(module.register_forward_pre_hook(check))
            layer.register_forward_pre_hook(functools.partial(self._enter, index))
            layer.register_forward_hook(functools.partial(self._leave, index))
        model.register_forward_pre_hook(self._start)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._places

    def rows(self, parameter: Tensor) -> tuple[slice, ...] | None:
        """Rows of a parameter, some of whose elements this rank holds; None: it holds none."""
        start, end = self._own_range(parameter)
        if start >= end:
            return None
        if parameter.dim() == 0:
            return ()
        row = max(1, parameter[0].numel())
        return (slice(start // row, -(-end // row)), *[slice(0, n) for n in parameter.shape[1:]])

    def store(self, parameter: Tensor, rows: Tensor) -> None:
        """Take what this rank holds of a parameter from the rows that `rows` named."""
        start, end = self._own_range(parameter)
        layer, first = self._places[id(parameter)]
        row = parameter[0].numel() if parameter.dim() else 1
        skipped = start - start // max(1, row) * row
        at = first + start - self._rank * self._lengths[layer]
        piece = self._pieces[layer][at : at + end - start]
        piece.copy_(rows.reshape(-1)[skipped : skipped + end - start])

    def _own_range(self, parameter: Tensor) -> tuple[int, int]:
        """First and last element of a parameter that this rank holds."""
        layer, begins = self._places[id(parameter)]
        first = self._rank * self._lengths[layer] - begins
        last = first + self._lengths[layer]
        return max(0, first), min(parameter.numel(), last)

    def _make_views(self, index: int, layer: nn.Module) -> None:
        whole, start = self._wholes[index], 0
        made: dict[int, nn.Parameter] = {}
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.requires_grad:
                    continue
                if id(parameter) not in made:
                    view = whole[start : start + parameter.numel()].view(parameter.shape)
                    # With a version of its own: a gather is no change to what autograd has saved,
                    # as the same values are there again when they are read.
                    real = nn.Parameter(view.data, requires_grad=False)
                    made[id(parameter)] = real
                    self._places[id(real)] = index, start
                    start += _padded(parameter)
                module._parameters[name] = made[id(parameter)]

    def _start(self, *_: Any) -> None:
        self._backward = False
        self._inside.clear()
        if self._passes == CHECKED_PASSES:
            while self._checks:
                self._checks.pop().remove()
        self._passes += 1

    def _enter(self, index: int, *_: Any) -> None:
        self._inside.add(index)
        self._fetch(index)

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.discard(index)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._enter_backward, index))

    def _enter_backward(self, index: int, gradient: Tensor) -> None:
        self._backward = True
        self._fetch(index)

    def _check(self, index: int, name: str, *_: Any) -> None:
        # What is recomputed in backward may be a layer's forward without the layer's call.
        here = self._held[index % BUFFERS] == index
        if not here or not (self._backward or index in self._inside):
            raise UnsupportedError(
                f"this model computes with {name} outside of the forward of its layer, whose "
                f"weights are not gathered then. Set strategy.gather: {self._otherwise}, or "
                "use strategy.name: ddp"
            )

    def _fetch(self, index: int) -> None:
        """A layer is about to be computed: have its weights here, the next one's on their way."""
        self._gather(index)
        handle, self._handles[index % BUFFERS] = self._handles[index % BUFFERS], None
        if handle is not None:
            handle.wait()
        following = index - 1 if self._backward else index + 1
        if 0 <= following < len(self._lists) and self._lists[following] == self._lists[index]:
            self._gather(following)

    def _gather(self, index: int) -> None:
        turn = index % BUFFERS
        if self._held[turn] == index:
            return
        self._held[turn] = index
        self._handles[turn] = dist.all_gather_into_tensor(
            self._wholes[index], self._pieces[index], group=self._group, async_op=True
        )


def flat_layers_fit(model: nn.Module) -> bool:
    """Whether a model's layers can be held so: all have frozen numbers, no more than an adapter is
    trained of them, and no two share a parameter."""
    layers = [list(layer.parameters()) for layer in decoder_layers(model)]
    every = [p for layer in layers for p in layer]
    frozen = [p for p in every if not p.requires_grad]
    trained = sum(p.numel() for p in every if p.requires_grad)
    return (
        bool(layers)
        and len({id(p) for p in every}) == len(every)
        and all(any(not p.requires_grad for p in layer) for layer in layers)
        and all(p.is_floating_point() for p in frozen)
        and trained <= SMALL_PART * sum(p.numel() for p in every)
    )


@dataclass(frozen=True, slots=True)
class FlatSizes:
    """What a model's flat layers come to, in elements.

    Attributes:
        lengths: of each layer's frozen weights, as all ranks hold them together.
        ranks: that do.
    """

    lengths: Sequence[int]
    ranks: int

    @classmethod
    def of(cls, model: nn.Module, ranks: int) -> FlatSizes:
        """Return the sizes of a model, real or on the meta device."""
        pieces = [_piece(_frozen_of(layer), ranks) for layer in decoder_layers(model)]
        return cls([ranks * piece for piece in pieces], ranks)

    @property
    def per_rank(self) -> int:
        """Elements that a rank holds."""
        return sum(self.lengths) // self.ranks

    @property
    def buffers(self) -> int:
        """Elements of the buffers in which layers come together."""
        return BUFFERS * max(self.lengths)

    @property
    def num_gathers(self) -> int:
        """Gathers in a forward and a backward, once there was a turn before them.

        The first layers are there from the backward before, the last ones from the forward.
        """
        return 2 * max(0, len(self.lengths) - BUFFERS)

    @property
    def num_gathered(self) -> int:
        """Elements that these gathers give."""
        kept = min(BUFFERS, len(self.lengths))
        return sum(self.lengths[kept:]) + sum(self.lengths[: len(self.lengths) - kept])


def not_flat(model: nn.Module) -> list[nn.Parameter]:
    """Frozen parameters outside of layers, which stay whole on each rank."""
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    return [p for p in model.parameters() if id(p) not in inside and not p.requires_grad]


def _frozen_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if not p.requires_grad]


def _piece(parameters: Sequence[nn.Parameter], ranks: int) -> int:
    """Elements that a rank holds of a layer's."""
    return -(-sum(map(_padded, parameters)) // (ranks * ALIGNED)) * ALIGNED


def _padded(parameter: Tensor) -> int:
    """Elements that a parameter takes."""
    return -(-parameter.numel() // ALIGNED) * ALIGNED


def _numbers_of_lists(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Number each layer by the module list that it is in."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    at = {id(layer): number for number, one in enumerate(lists) for layer in one}
    return [at[id(layer)] for layer in layers]
