"""Tensor parallelism: the ranks of a group each compute some heads and some inner numbers.

Parameters are plain tensors, this rank's parts, so that kernels and optimizers take them as they
are; what ranks hand to each other is at the edges of blocks (https://arxiv.org/abs/1909.08053).
With sequence parallelism (https://arxiv.org/abs/2205.05198) a rank has its part of the positions
between blocks. The output layer is whole on each rank, which has the loss of its own positions:
that sends less than logits or sums of a divided vocabulary would, and takes any loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anygauge.interface import Workload
from anygauge.strategies.context.context_parallel import attend_in_parts
from anygauge.strategies.shared.common import trained_parameters
from anygauge.strategies.shared.degrees import Degrees
from anygauge.strategies.shared.exchanges import (
    GATHER,
    OWN,
    OWN_ALONE,
    OWN_GRADIENT,
    REJOIN,
    SCATTER,
    SUM,
    SUM_GRADIENT,
    CountedGroup,
    Group,
    gather_dim,
    group_along,
    over_ranks,
    rank_in,
    size_of,
    split_dim,
)
from anygauge.strategies.shared.footprint import EstimatedStrategy
from anygauge.strategies.shared.layout import Cut, GroupLayout, TensorLayout
from anygauge.strategies.shared.materialize import causal_of, decoder_of
from anygauge.strategies.shared.tensor_plans import all_positions_after
from anygauge.strategies.tensor.division import Division, divide, partial_gradients
from anygauge.strategies.tensor.experts import use_own_experts

HIDDEN = "hidden_states"


class TensorParts(GroupLayout):
    """This rank's parts of cut parameters, laid out by another layout; see `TensorLayout`.

    Args:
        inner: of what is cut already.
        cuts: by the identity of a parameter, trained or not.
        trained: in the engine's order.
    """

    def __init__(
        self,
        inner: TensorLayout,
        cuts: Mapping[int, Cut],
        trained: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(group, device, inner)
        self._cuts = cuts
        self._cut = [id(parameter) in cuts for parameter in trained]

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `TensorLayout.local`."""
        return self._inner.local(parameter)

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `TensorLayout.shape`."""
        shape = list(self._inner.shape(parameter))
        cut = self._cuts.get(id(parameter))
        if cut is not None:
            shape[cut.dim] *= cut.count
        return tuple(shape)

    def grad_square(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """See `TensorLayout.grad_square`; what every rank of the group has counts once."""
        cut = [part for part, is_cut in zip(parts, self._cut, strict=True) if is_cut]
        whole = [part for part, is_cut in zip(parts, self._cut, strict=True) if not is_cut]
        total = self._inner.grad_square(cut).to(self._device)
        dist.all_reduce(total, group=self._group)
        return total + self._inner.grad_square(whole).to(self._device)

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """See `TensorLayout.gather`."""
        mine = self._inner.gather(parameter, part).to(self._device)
        cut = self._cuts.get(id(parameter))
        return mine if cut is None else gather_dim(mine, self._group, cut.dim)

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """See `TensorLayout.part`."""
        cut = self._cuts.get(id(parameter))
        if cut is not None:
            at = (*(slice(None),) * cut.dim, cut.place(whole.shape[cut.dim]))
            whole = whole[at]
        return self._inner.part(parameter, whole)


@dataclass(frozen=True, slots=True)
class DividedModel:
    """A model of which this rank computes a part: of layers, of sequences, or all of it.

    Attributes:
        division: None where layers are whole.
        group: the ranks that have the logits of a sequence together; None: each has all.
    """

    division: Division | None
    options: Degrees
    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """See `Division.cuts`."""
        return {} if self.division is None else self.division.cuts

    def layout(self, inner: TensorLayout, model: nn.Module) -> TensorLayout:
        """Return the layout of the whole model's tensors, where `inner` is that of the parts."""
        if self.division is None or self.group is None:
            return inner
        at = dict(model.named_parameters())
        cuts = {id(at[name]): cut for name, cut in self.division.cuts.items()}
        trained = [parameter for _, parameter in trained_parameters(model)]
        return TensorParts(inner, cuts, trained, self.group, self.device)

    def partial_sums(self, model: nn.Module) -> list[tuple[list[int], dist.ProcessGroup]]:
        """Places of trained parameters of whose gradients each rank has a part of the sum."""
        if self.division is None or self.group is None:
            return []
        trained = trained_parameters(model)
        names = [name for name, _ in trained]
        partial = partial_gradients(model, self.division, self.options, names)
        here = [not parameter.is_meta for _, parameter in trained]  # other stages' are not
        places = [at for at, is_part in enumerate(partial) if is_part and here[at]]
        return [(places, self.group)]

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits of this rank's positions -> those of all, (B, T, V)."""
        return logits if self.group is None else gather_dim(logits, self.group, 1)


def divide_model(
    model: nn.Module, options: Degrees, mesh: DeviceMesh | None, device: torch.device
) -> DividedModel:
    """Give this rank its part of every layer or sequence, as the degrees say.

    Args:
        model: adapted; may be on meta.
        mesh: None where there are no degrees.
    """
    division = None
    if (group := group_along(mesh, "tensor")) is not None:
        division = divide(model, options.tp, rank_in(group))
        connect_ranks(model, division, options, group)
    elif (group := group_along(mesh, "context")) is not None:
        attend_in_parts(model, group, options.cp_method)
    return DividedModel(division, options, group, device)


def connect_ranks(model: nn.Module, division: Division, options: Degrees, group: Group) -> None:
    """Let a divided model compute what the whole one does, together with the group's ranks.

    With ``shift_labels`` it returns the loss of this rank's positions, without them their logits.

    Args:
        model: adapted; its length of sequences is a multiple of the group's ranks.
    """
    parts = options.sequence_parallel

    def gather(x: Tensor) -> Tensor:
        # Blocks of all kinds view it as rows of tokens.
        return over_ranks(x, GATHER, group, x.dim() - 2).contiguous()

    def own_positions(x: Tensor) -> Tensor:
        """Of what every rank computes alike; the gradient of others' positions is zero here."""
        return over_ranks(x, OWN_ALONE, group, x.dim() - 2)

    into = gather if parts else lambda x: over_ranks(x, SUM_GRADIENT, group)
    for layer in division.layers:
        for entry in layer.entries:
            _on_input(entry, into)
        for row in layer.rows:
            _on_output(row, group, parts)
        for mixture in layer.mixtures:
            # Some blocks change what they are given, in place.
            _on_input(mixture.block, torch.clone)
            use_own_experts(mixture, rank_in(group), size_of(group))
        for block in layer.whole if parts else ():
            _on_input(block, gather)
            _on_result(block, own_positions)
    if division.embedding is not None:
        _divide_vocabulary(division.embedding, group)
    # What comes before the layers is whole: where the output layer shares its weight, the gradient
    # is a part of a sum on each rank, as that of the output layer is.
    first = division.layers[0].module
    whole = division.embedding is not None
    if parts:
        _on_input(first, lambda x: over_ranks(x, OWN if whole else OWN_ALONE, group, 1))
    elif not whole:
        _on_input(first, lambda x: over_ranks(x, OWN_GRADIENT, group, 1))
    causal = causal_of(model)
    last = all_positions_after(causal.config)
    if parts and last is not None:
        end = decoder_of(causal).get_submodule(last)
        end.register_forward_hook(lambda _, args, output: over_ranks(output, REJOIN, group, 1))
    if not parts or last is not None:
        _on_input(causal.get_output_embeddings(), lambda x: over_ranks(x, OWN, group, 1))
    model.register_forward_pre_hook(functools.partial(_own_labels, group), with_kwargs=True)


def _on_input(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change the hidden states that a module is called with."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, HIDDEN: change(kwargs[HIDDEN])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _on_output(row: Any, group: Group, parts: bool) -> None:
    """Sum a layer's or block's output over ranks, and add a layer's bias once."""
    base = getattr(row, "base_layer", row)
    bias = type(base) is nn.Linear and base.bias is not None
    if bias:
        base.forward = lambda x: nn.functional.linear(x, base.weight)

    def total(output: Tensor) -> Tensor:
        way = (SCATTER, group, output.dim() - 2) if parts else (SUM, group)
        summed = over_ranks(output, *way)
        return summed + base.bias.to(summed.dtype) if bias else summed

    _on_result(row, total)


def _on_result(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the hidden states that a module returns, alone or first of several."""

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    module.register_forward_hook(after)


def _divide_vocabulary(embedding: Any, group: Group) -> None:
    """Look up this rank's rows of the vocabulary, and sum over ranks."""

    def forward(ids: Tensor) -> Tensor:
        weight = embedding.weight
        start = rank_in(group) * weight.shape[0]
        inside = (ids >= start) & (ids < start + weight.shape[0])
        padding = embedding.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < start + weight.shape[0] else None
        local = torch.where(inside, ids - start, 0)
        # Rows of others are looked up as row 0, and give it no gradient.
        found = nn.functional.embedding(local, weight, padding) * inside[..., None].to(weight.dtype)
        return over_ranks(found, SUM, group)

    embedding.forward = forward


def _own_labels(group: Group, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    labels = kwargs.get("shift_labels")
    if labels is not None:
        kwargs = {**kwargs, "shift_labels": split_dim(labels, group, 1)}
    return args, kwargs


class DividedStrategy(EstimatedStrategy):
    """A strategy with `Degrees`."""

    options: Degrees

    def part_of(self, model: nn.Module, workload: Workload) -> None:
        """See `StrategyPlanner.part_of`; a stage of a pipeline has whole layers."""
        options = self.options
        if options.tp > 1:
            group = CountedGroup(options.tp, workload.rank % options.tp)
            connect_ranks(model, divide(model, group.size, group.rank), options, group)
        elif options.cp > 1:
            group = CountedGroup(options.cp, workload.rank % options.cp)
            attend_in_parts(model, group, options.cp_method)
