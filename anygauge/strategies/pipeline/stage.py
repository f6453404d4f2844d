"""Stages of a pipeline: where a model is cut, who has which, and how one of them is called.

The model's tree stays whole. A stage calls the architecture's own decoder, in which the layers of
other stages are passed by; so masks, positions and what else surrounds the layers are the
architecture's. That this is the whole computation is tried once, without weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import DeviceBatch, UnsupportedError
from anygauge.strategies.shared.degrees import Degrees, stages_per_rank
from anygauge.strategies.shared.footprint import numel
from anygauge.strategies.shared.materialize import causal_of, decoder_layers, decoder_of
from anygauge.util.text import first_line

BEFORE = "it changes its embeddings before its first layer"
AFTER = "it changes hidden states after its last layer"
REMEDY = "Set strategy.pp: 1, and use strategy.name: fsdp or zero to shard the model instead"


@dataclass(frozen=True, slots=True)
class StagePart:
    """Stage `index` of `count`: decoder layers from `first` to before `end`."""

    index: int
    count: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer, and makes the loss."""
        return self.index == self.count - 1


def stage_parts(model: nn.Module, options: Degrees) -> list[StagePart]:
    """The stages of an adapted model, cut so that the costliest costs least.

    Args:
        model: whose layers are divided already, where they are to be.

    A layer costs what its matrices do, in operations a token: as many as it has numbers, times a
    factor that is the same for all. The output layer belongs to the last stage, and ranks that
    divide layers each compute their positions of it; to look up an embedding costs nothing.
    """
    causal = causal_of(model)
    layers = list(decoder_layers(decoder_of(causal)))
    costs = [numel(layer.parameters()) for layer in layers]
    head = causal.get_output_embeddings()
    last = 0 if head is None else numel(head.parameters()) // options.tp
    count = options.pp * stages_per_rank(options)
    ends = split_costs(costs, count, last)
    return [
        StagePart(index, count, first, end)
        for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def split_costs(costs: Sequence[int], count: int, last: int = 0) -> list[int]:
    """Divide neighbouring layers into `count` parts, none of them empty; returns their ends.

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
    """Return the stages of the rank at a place in its pipeline."""
    return [part for part in stages if rank_of_stage(part.index, options) == place]


class SkippedLayer(nn.Module):
    """Stands in for a layer: returns its input, in the form in which the layer would.

    Args:
        result: of the stage before, in place of that.
    """

    def __init__(self, layer: nn.Module, as_tuple: bool, result: Tensor | None = None) -> None:
        super().__init__()
        # No child: its parameters are not this module's.
        self.__dict__["layer"] = layer
        self.as_tuple = as_tuple
        self.result = result

    def __getattr__(self, name: str) -> Any:
        """Return what decoders read off a layer, such as its kind of attention."""
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Nothing is computed."""
        hidden_states = hidden_states if self.result is None else self.result
        return (hidden_states,) if self.as_tuple else hidden_states


class IdentityAfter(nn.Module):
    """Stands in for a module after the layers, or for one that may not be there.

    Args:
        note: called with it.
    """

    def __init__(self, note: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._note = note

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing is done."""
        self._note()
        return x


class PipelineModel:
    """A model of which stages can be called.

    Args:
        model: adapted; its parameters may be on the meta device.

    Raises:
        UnsupportedError: its decoder does more than to call its layers one after another.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.causal = causal_of(model)
        self.decoder = decoder_of(self.causal)
        self.layers = list(decoder_layers(self.decoder))
        names = [n for n, m in self.decoder.named_children() if isinstance(m, nn.ModuleList)]
        if len(names) != 1 or list(getattr(self.decoder, names[0])) != self.layers:
            raise UnsupportedError(
                f"strategy.pp: {type(self.decoder).__name__} has its layers in {len(names)} lists, "
                f"not in one. {REMEDY}"
            )
        self._list = names[0]
        self._as_tuple, self.after = self._probe_layers()

    def part(self, part: StagePart) -> nn.ModuleList:
        """The modules whose parameters belong to a stage."""
        layers = self.layers[part.first : part.end]
        found = list(layers)
        if part.is_first:
            found.append(self.causal.get_input_embeddings())
        if part.is_last:
            found += [self.decoder.get_submodule(name) for name in self.after]
            head = self.causal.get_output_embeddings()
            found += [] if head is None else [head]
        return nn.ModuleList(found)

    def call(self, part: StagePart, hidden: Tensor | None, inputs: Mapping[str, Any]) -> Any:
        """A stage's output: hidden states (B, T, H), or what the model returns.

        Args:
            hidden: of the stage before, where layers are divided of this rank's positions alone;
                of the first, what was embedded, or None.
            inputs: of the model, on every rank.
        """
        inputs, before = dict(inputs), None
        if hidden is not None:
            ids = inputs.pop("input_ids")
            inputs["inputs_embeds"] = hidden
            if not part.is_first:
                # Decoders make masks of all positions by it, and give it to the first layer.
                before, width = hidden, hidden.shape[-1]
                inputs["inputs_embeds"] = hidden.new_zeros(()).expand(*ids.shape, width)
        with self._with_layers(part, before):
            if part.is_last:
                return self.model(**inputs)
            inputs.pop("shift_labels", None)
            return self.decoder(**inputs).last_hidden_state

    @contextlib.contextmanager
    def _with_layers(self, part: StagePart, before: Tensor | None) -> Iterator[None]:
        """Other stages' layers are passed by; recomputation calls layers alone, not the list."""
        layers = [
            layer
            if part.first <= at < part.end
            else SkippedLayer(layer, self._as_tuple, before if at == part.first - 1 else None)
            for at, layer in enumerate(self.layers)
        ]
        changes: dict[str, nn.Module] = {self._list: nn.ModuleList(layers)}
        if not part.is_last:
            changes |= {name: IdentityAfter() for name in self.after}
        with _swap_children(self.decoder, changes):
            yield

    def _probe_layers(self) -> tuple[bool, list[str]]:
        """Whether layers return tuples, and what is called after them."""
        hidden = torch.linspace(-1.0, 1.0, 2 * 4 * 8).reshape(2, 4, 8)
        self.decoder.train()  # dropout in every stage would show
        others = {
            name: child
            for name, child in self.decoder.named_children()
            if name != self._list and any(True for _ in child.parameters())
        }
        reasons = []
        for as_tuple in (False, True):
            called: list[str] = []
            entered: list[Tensor] = []
            stand_ins: dict[str, nn.Module] = {
                name: IdentityAfter(functools.partial(called.append, name)) for name in others
            }
            layers = [SkippedLayer(layer, as_tuple) for layer in self.layers]
            layers[0].register_forward_pre_hook(
                lambda _, args, kwargs, entered=entered: entered.append(
                    args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
            layers[-1].register_forward_pre_hook(lambda *_, called=called: called.clear())
            try:
                with (
                    torch.no_grad(),
                    _swap_children(self.decoder, {**stand_ins, self._list: nn.ModuleList(layers)}),
                ):
                    output = self.decoder(
                        inputs_embeds=hidden,
                        position_ids=torch.arange(4).expand(2, 4),
                        use_cache=False,
                    ).last_hidden_state
            except Exception as error:
                said = first_line(error)
                reasons.append(said if entered else BEFORE)
                continue
            if not entered or not torch.equal(entered[0], hidden):
                reasons.append(BEFORE)
            elif output.shape != hidden.shape or not torch.equal(output, hidden):
                reasons.append(AFTER)
            else:
                return as_tuple, called
        raise UnsupportedError(
            f"strategy.pp: {type(self.decoder).__name__} cannot be cut between its layers: "
            f"{next((r for r in reasons if r in (BEFORE, AFTER)), reasons[0])}. {REMEDY}"
        )


@contextlib.contextmanager
def _swap_children(module: nn.Module, children: Mapping[str, nn.Module]) -> Iterator[None]:
    """Other children for a while; names of parameters outside of it stay what they are."""
    kept = {name: module._modules[name] for name in children}
    module._modules.update(children)
    try:
        yield
    finally:
        module._modules.update(kept)


class Stage(nn.Module):
    """What torch's schedules call: hidden states in, hidden states or a loss out.

    Args:
        take: micro-batch's number -> its inputs on this rank.
        loss: number, and what the last stage's model returned -> what backward begins with.
    """

    def __init__(
        self,
        model: PipelineModel,
        part: StagePart,
        take: Callable[[int, StagePart], DeviceBatch],
        loss: Callable[[int, Any], Tensor],
    ) -> None:
        super().__init__()
        # It is not a module: torch asks a stage for the parameters that are its own.
        self._pipeline = model
        self.own = model.part(part)
        self.part = part
        self._take = take
        self._loss = loss
        self._starts = part.is_first and not any(p.requires_grad for p in self.own.parameters())

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Args:
        x: (B, T, H) of the stage before; of the first, the same as `turn`.
        turn: (1,), which of the step's micro-batches it is.
        """
        number = int(turn)
        inputs = self._take(number, self.part)
        hidden = None if self.part.is_first else x
        if self._starts:
            # A stage's backward needs a way, also where nothing is trained before.
            hidden = self._pipeline.causal.get_input_embeddings()(inputs["input_ids"])
            hidden.requires_grad_()
        found = self._pipeline.call(self.part, hidden, inputs)
        return self._loss(number, found) if self.part.is_last else found


def stage_parameter_ids(model: PipelineModel, parts: Sequence[StagePart]) -> set[int]:
    """Identities of the parameters of some stages."""
    return {id(p) for part in parts for p in model.part(part).parameters()}
