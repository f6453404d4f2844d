"""Frozen layers in flat pieces: what is gathered when, and that nothing else happens to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from anygauge.interface import UnsupportedError
from anygauge.strategies.shared import flat as flat_module
from anygauge.strategies.shared.flat import FlatLayers, FlatSizes, flat_layers_fit

WIDTH = 5
CPU = torch.device("cpu")


class OddLayer(nn.Module):
    """Frozen weights of odd sizes, and an adapter."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 + index)
        self.down = nn.Linear(3 + index, WIDTH)
        self.adapter = nn.Parameter(torch.ones(1))
        self.requires_grad_(False)
        self.adapter.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.adapter * self.down(torch.tanh(self.up(x)))


class OddModel(nn.Module):
    """Layers in a row."""

    def __init__(self, layers: int, recomputed: bool = False, reaches: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OddLayer(index) for index in range(layers))
        self.recomputed, self.reaches = recomputed, reaches

    def forward(self, x: Tensor) -> Tensor:
        if self.reaches:
            x = x + self.layers[0].get_submodule("up")(x).sum()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x


class RanksInTurn:
    """Ranks of which this process is one after the other, without a process group.

    Attributes:
        events: what rank 0 did: ``("gather", 2)``, ``("wait", 2)``.
        rank: which one this process is now.
    """

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.rank, self._world = 0, world
        self._flats: list[FlatLayers] = []
        monkeypatch.setattr(flat_module.dist, "get_rank", lambda group: self.rank)
        monkeypatch.setattr(flat_module.dist, "get_world_size", lambda group: world)
        monkeypatch.setattr(flat_module.dist, "all_gather_into_tensor", self._gather)

    def shard(self, model: nn.Module) -> nn.Module:
        """Rank 0's, with the model's values; the others have their pieces of it."""
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        models = [copy.deepcopy(model) for _ in range(self._world)]
        for self.rank, one in enumerate(models):
            flat = FlatLayers(one, None, CPU, otherwise="step")  # type: ignore[arg-type]
            self._flats.append(flat)
            for name, parameter in one.named_parameters():
                if parameter in flat:
                    rows = flat.rows(parameter)
                    if rows is not None:
                        flat.store(parameter, values[name][rows])
        self.rank = 0
        return models[0]

    def _gather(self, output: Tensor, piece: Tensor, group: Any, async_op: bool) -> Any:
        assert async_op
        layer = next(i for i, own in enumerate(self._flats[0]._pieces) if own is piece)
        self.events.append(("gather", layer))

        class Handle:
            @staticmethod
            def wait() -> None:
                parts = output.chunk(len(self._flats))
                for part, flat in zip(parts, self._flats, strict=True):
                    part.copy_(flat._pieces[layer])
                self.events.append(("wait", layer))

        output.fill_(torch.nan)  # nobody may read it before
        return Handle()

    def gathered(self) -> list[int]:
        """Layers that were gathered since the last call, in order."""
        found = [layer for what, layer in self.events if what == "gather"]
        self.events.clear()
        return found


Ranks = Callable[[int], RanksInTurn]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return lambda world: RanksInTurn(world, monkeypatch)


def step(model: nn.Module, rows: int = 2) -> tuple[Tensor, list[Tensor]]:
    """The result and the adapters' gradients of a forward and a backward."""
    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).requires_grad_()
    result = model(x)
    (result**2).sum().backward()
    adapters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in adapters]
    for p in adapters:
        p.grad = None
    return result.detach(), [g for g in gradients if g is not None]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_is_that_of_the_whole_model(
    ranks: Ranks, layers: int, recomputed: bool, world: int
) -> None:
    model = OddModel(layers, recomputed)
    wanted = step(model)
    sharded = ranks(world).shard(model)
    for _ in range(2):
        found = step(sharded)
        assert torch.equal(found[0], wanted[0])
        assert len(found[1]) == layers
        assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_there_is_not_gathered_again(ranks: Ranks, recomputed: bool) -> None:
    of = ranks(2)
    model = of.shard(OddModel(4, recomputed))
    step(model)
    assert of.gathered() == [0, 1, 2, 3, 1, 0]
    step(model)
    found = of.gathered()
    assert found == [2, 3, 1, 0]
    sizes = FlatSizes.of(OddModel(4), 2)
    assert sizes.num_gathered == sum(sizes.lengths[index] for index in found)
    assert sizes.num_gathers == len(found)
    with torch.no_grad():  # an evaluation between two steps
        model(torch.zeros(1, WIDTH))
    assert of.gathered() == [2, 3]
    step(model)
    assert of.gathered() == [0, 1, 2, 3, 1, 0]


def test_the_next_layer_is_under_way_while_one_computes(ranks: Ranks) -> None:
    of = ranks(2)
    model = of.shard(OddModel(5))
    for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
        layer.up.register_forward_pre_hook(lambda *_, i=index: of.events.append(("compute", i)))
    model(torch.zeros(1, WIDTH))
    for index in range(4):
        at = of.events.index(("compute", index))
        assert ("wait", index) in of.events[:at]
        assert ("gather", index + 1) in of.events[:at]
        assert ("wait", index + 1) not in of.events[:at]


def test_a_step_makes_no_memory_for_weights(ranks: Ranks) -> None:
    model = ranks(2).shard(OddModel(4))
    step(model, rows=1)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.requires_grad}
    assert len(weights) == 2
    places = [p.data_ptr() for p in model.parameters()]
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
                made.append(result.untyped_storage().nbytes())
            return result

    with Watch():
        step(model, rows=1)
    smallest = min(p.numel() for p in model.parameters() if p.dim() == 2)
    assert made
    assert max(made) < 4 * smallest
    assert places == [p.data_ptr() for p in model.parameters()]


def test_weights_used_outside_of_their_layer_are_refused(ranks: Ranks) -> None:
    model = ranks(2).shard(OddModel(3, reaches=True))
    with pytest.raises(UnsupportedError, match=r"layer 0\.up outside .* strategy\.gather: step"):
        step(model)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5
    ),
    world=st.integers(1, 5),
)
def test_each_rank_reads_no_more_rows_than_its_piece_touches(
    shapes: list[tuple[int, ...]], world: int
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, shape in enumerate(shapes):
                value = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) + 100 * index
                self.register_parameter(f"w{index}", nn.Parameter(value, requires_grad=False))

        def forward(self, x: Tensor) -> Tensor:
            return x + sum(p.sum() for p in self.parameters())

    model = nn.Module()
    model.layers = nn.ModuleList([Odd()])
    with pytest.MonkeyPatch.context() as patch:
        of = RanksInTurn(world, patch)
        sharded = of.shard(model)
        sharded.get_submodule("layers.0")(torch.zeros(1))
    for name, parameter in model.named_parameters():
        assert torch.equal(sharded.get_parameter(name), parameter)


def shares(model: Any) -> None:
    model.layers[1].up = model.layers[0].up


def trains_all(model: Any) -> None:
    model.requires_grad_(True)


def trains_half(model: Any) -> None:
    model.layers[0].requires_grad_(True)


def has_codes(model: Any) -> None:
    up = torch.zeros(4, dtype=torch.uint8)
    model.layers[0].up.weight = nn.Parameter(up, requires_grad=False)


def has_no_layers(model: Any) -> None:
    model.layers = nn.Identity()


@pytest.mark.parametrize("change", [shares, trains_all, trains_half, has_codes, has_no_layers])
def test_others_are_left_to_fsdp2(change: Callable[[Any], None]) -> None:
    model = OddModel(2)
    assert flat_layers_fit(model)
    change(model)
    assert not flat_layers_fit(model)
