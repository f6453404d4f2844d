"""Which weights ZeRO-3 has whole at each time of a step: DeepSpeed's rules, followed by numbers.

`Gathering` does to sizes what DeepSpeed's `PartitionedParameterCoordinator` does to tensors, in the
order in which its hooks do it. Its trace of modules is complete from the third micro-batch on; the
first two fetch nothing ahead, and take less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from anygauge.strategies.materialise import decoder_layers


@dataclass(eq=False, slots=True)
class Weight:
    """One parameter: numbers in it, bytes of it whole, its place in the model."""

    place: int
    numbers: int
    size: int
    trained: bool
    resident: bool
    whole: bool = False
    """It is there, or on its way."""
    expected: int = -1
    """Last step for which a fetch has looked at it."""
    users: set[Stop] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Stop:
    """A module at which weights are fetched.

    Attributes:
        direct: its own parameters.
        below: those, and all of the modules below it.
        piece: it is gathered with all below it.
        layer: the decoder layer that it is, or is in.
    """

    direct: tuple[Weight, ...]
    below: tuple[Weight, ...]
    piece: bool
    layer: Stop | None = None

    @property
    def own(self) -> tuple[Weight, ...]:
        """What it fetches."""
        return self.below if self.piece else self.direct


FORWARD, BACKWARD, AGAIN = "forward", "backward", "again"
Event = tuple[str, Stop, bool]
"""Pass (`AGAIN`: forward that is recomputed), module, and whether it is entered or left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Bytes of whole weights at a module.

    Attributes:
        fetching: at the most until it computes: a collective's result is there until all that came
            with it were asked for, beside the weights that were copied out of it.
        computing: while it computes, with what is on its way.
    """

    passing: str
    stop: Stop
    fetching: int
    computing: int


class Pieces:
    """The modules of a model in the order in which they are called, which is that of definition.

    Args:
        size: bytes of a whole parameter.
        resident: most numbers of a parameter that stays whole.
        by_layer: decoder layers are gathered as one piece.
    """

    def __init__(
        self, model: nn.Module, size: Callable[[Any], int], resident: int, *, by_layer: bool
    ) -> None:
        self._layers = set(decoder_layers(model))
        self._by_layer = by_layer
        self.weights: dict[nn.Parameter, Weight] = {}
        for parameter in model.parameters():
            self.weights[parameter] = Weight(
                place=len(self.weights),
                numbers=parameter.numel(),
                size=size(parameter),
                trained=parameter.requires_grad,
                resident=parameter.numel() <= resident,
            )
        self.calls: list[tuple[Stop, bool]] = list(self._walk(model, None))
        entered = [stop for stop, enters in self.calls if enters]
        self.layers = [stop for stop in entered if stop.layer is stop]
        outer = [stop for stop in entered if stop.layer is None]
        at = entered.index(self.layers[0])
        self.around = [stop for stop in outer if not stop.own]
        self.before = [stop for stop in entered[:at] if stop.own]
        self.after = [stop for stop in outer if stop.own and stop not in self.before]

    def _walk(self, module: nn.Module, layer: Stop | None) -> Iterator[tuple[Stop, bool]]:
        if not any(True for _ in module.parameters()):
            return
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            for child in module.children():
                yield from self._walk(child, layer)
            return
        below = tuple(self.weights[p] for p in module.parameters())
        direct = tuple(self.weights[p] for p in module.parameters(recurse=False))
        is_layer = layer is None and module in self._layers
        piece = is_layer and self._by_layer
        stop = Stop(direct, below, piece, layer)
        if is_layer:
            layer = stop.layer = stop
        yield stop, True
        if not piece:
            for child in module.children():
                yield from self._walk(child, layer)
        yield stop, False

    def step(self, recomputes: Sequence[bool]) -> list[Event]:
        """What happens in a micro-batch.

        A frozen output layer is not in backward: the loss's gradient is made in forward.
        """
        events: list[Event] = [(FORWARD, stop, enters) for stop, enters in self.calls]

        def backward(stop: Stop) -> Iterator[Event]:
            yield BACKWARD, stop, True
            yield BACKWARD, stop, False

        for stop in self.around[:-1]:
            events.append((BACKWARD, stop, True))
        after = list(reversed(self.after))
        if after and any(weight.trained for weight in after[0].own):
            events += backward(after[0])
        for stop in (*self.around[-1:], *after[1:]):
            events += backward(stop)
        for layer, again in reversed(list(zip(self.layers, recomputes, strict=True))):
            inner = [(s, enters) for s, enters in self.calls if s.layer is layer]
            events.append((BACKWARD, layer, True))
            if again:
                # It ends when the last tensor was kept, before the layer is left.
                events += [(AGAIN, s, enters) for s, enters in inner if enters or s is not layer]
            for stop in reversed([s for s, enters in inner if enters and s is not layer]):
                events += backward(stop)
            events.append((BACKWARD, layer, False))
        for stop in reversed(self.before):
            events.append((BACKWARD, stop, True))
        return events


class Gathering:
    """Follows DeepSpeed's coordinator through a step.

    Args:
        prefetch, live, reuse: ``stage3_prefetch_bucket_size``, ``stage3_max_live_parameters`` and
            ``stage3_max_reuse_distance``, in numbers.
    """

    def __init__(self, events: Sequence[Event], *, prefetch: int, live: int, reuse: int) -> None:
        self._events = events
        self._prefetch, self._live, self._reuse = prefetch, live, reuse
        self._order = [stop for _, stop, enters in events if enters]
        self._uses = [
            (weight, step)
            for step, stop in enumerate(self._order)
            for weight in sorted(stop.own, key=lambda one: one.place)
        ]
        self._sets: dict[tuple[Stop, bool], tuple[frozenset[Weight], int]] = {}
        self._groups: dict[Weight, _Gather] = {}
        self._whole = 0
        self._numbers = 0
        self._step = 0
        self._queue: deque[tuple[Weight, int]] = deque()
        self.calls = 0
        self.gathered = 0

    def run(self) -> list[Whole]:
        """One micro-batch, the trace of modules being complete."""
        self._end()
        self.calls = self.gathered = 0
        found = []
        for passing, stop, enters in self._events:
            if enters:
                fetching = self._fetch(stop, again=passing == AGAIN)
                found.append(
                    Whole(passing=passing, stop=stop, fetching=fetching, computing=self._bytes)
                )
            else:
                self._leave(stop, backward=passing == BACKWARD)
        self._end()
        return found

    def _end(self) -> None:
        """``release_backward_leftovers``, and ``reset_step`` before the next micro-batch."""
        self._queue = deque(self._uses)
        self._groups.clear()
        self._whole = self._numbers = self._step = 0
        for weight, _ in self._uses:
            weight.whole, weight.expected = weight.resident, -1
            weight.users.clear()

    @property
    def _bytes(self) -> int:
        return self._whole + sum(group.buffer for group in set(self._groups.values()))

    def _gather(self, weights: Sequence[Weight]) -> None:
        """``__all_gather_params``: one weight comes as it is, several in a buffer."""
        if not weights:
            return
        size = sum(weight.size for weight in weights)
        group = _Gather(tuple(weights), size if len(weights) > 1 else 0)
        if len(weights) == 1:
            self._whole += size
        for weight in weights:
            weight.whole = True
            self._groups[weight] = group
            self._numbers += weight.numbers
        self.calls += 1
        self.gathered += size

    def _fetch(self, stop: Stop, *, again: bool) -> int:
        """``fetch_sub_module``; returns the most that was there."""
        self._gather([weight for weight in stop.own if not weight.whole])
        for weight in stop.own:
            weight.users.add(stop)
            if again and not weight.trained and stop.layer is not None:
                weight.users.add(stop.layer)
        # In which order it waits for weights is not said: at the most, each result is still there.
        for group in {self._groups[weight] for weight in stop.own if weight in self._groups}:
            if group.buffer and not group.copied:
                self._whole += group.buffer
            group.copied = True
        most = self._bytes
        for weight in stop.own:
            self._groups.pop(weight, None)
        new = {weight for weight in stop.own if weight.expected < self._step}
        while self._queue and new:
            weight, step = self._queue.popleft()
            weight.expected = step
            new.discard(weight)
        room = min(self._live - self._numbers, self._prefetch)
        ahead: list[Weight] = []
        numbers = 0
        while self._queue and numbers < room:
            weight, step = self._queue.popleft()
            weight.expected = max(weight.expected, step)
            if not weight.whole and weight not in ahead:
                ahead.append(weight)
                numbers += weight.numbers
        self._gather(ahead)
        self._step += 1
        return most

    def _leave(self, stop: Stop, *, backward: bool) -> None:
        """``release_sub_module``"""
        free = self._to_free(stop)
        mine = set(stop.own)
        if backward and stop.layer is stop:
            mine.update(stop.below)
            free.update(w for w in stop.below if not w.resident and not w.trained)
        for weight in mine:
            weight.users.discard(stop)
            if weight in free:
                self._free(weight)

    def _to_free(self, stop: Stop) -> set[Weight]:
        """``__params_to_release``: those that no later module within reach reads."""
        found = {
            weight
            for weight in stop.own
            if not weight.resident and not weight.expected > self._step
        }
        passed = 0
        for later in self._order[self._step :]:
            if passed >= self._reuse or not found:
                break
            # It looks below later modules where the one that is left is a piece.
            key = later, stop.piece
            if key not in self._sets:
                reads = later.below if stop.piece else later.direct
                self._sets[key] = frozenset(reads), sum(one.numbers for one in reads)
            weights, numbers = self._sets[key]
            found -= weights
            passed += numbers
        return found

    def _free(self, weight: Weight) -> None:
        if weight.whole and not weight.resident and not weight.users:
            group = self._groups.get(weight)
            if group is not None and not group.copied:
                return  # on its way
            weight.whole = False
            self._whole -= weight.size
            self._numbers -= weight.numbers


@dataclass(eq=False, slots=True)
class _Gather:
    """One collective: what it brings, its result's bytes, and whether weights were copied out."""

    weights: tuple[Weight, ...]
    buffer: int
    copied: bool = False
