"""A layer that ZeRO-3 gathers as one piece: which modules they are, and what they must be given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from anygauge.interface import UnsupportedError
from anygauge.strategies.materialise import decoder_layers
from anygauge.strategies.zero_runtime import (
    _differentiable_input_first,
    leave_as_a_step_does,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_layers_are_the_outermost_members_with_parameters() -> None:
    layers = nn.ModuleList([Layer(), Layer(), nn.Identity()])
    model = nn.ModuleDict({"body": nn.ModuleDict({"layers": layers}), "head": nn.Linear(2, 2)})
    assert list(decoder_layers(model)) == [layers[0], layers[1]]


def test_a_hidden_state_given_by_name_becomes_positional() -> None:
    hidden, mask = torch.zeros(1, requires_grad=True), torch.zeros(1)
    args, kwargs = _differentiable_input_first(Layer(), (), {"mask": mask, "hidden": hidden})
    assert args == (hidden,)
    assert kwargs == {"mask": mask}


def test_a_positional_hidden_state_is_left_alone() -> None:
    hidden = torch.zeros(1, requires_grad=True)
    assert _differentiable_input_first(Layer(), (hidden,), {}) == ((hidden,), {})


@pytest.mark.parametrize("args", [(), (torch.zeros(1),)])
def test_a_layer_whose_gradients_would_be_lost_is_refused(args: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"received no input.*strategy\.gather: module"):
        _differentiable_input_first(Layer(), args, {"mask": torch.zeros(1)})
    with torch.no_grad():
        assert _differentiable_input_first(Layer(), args, {}) == (args, {})


class Weight:
    """What DeepSpeed knows of a parameter, and what was done with it."""

    def __init__(self, status: str, *, resident: bool = False) -> None:
        self.ds_status = SimpleNamespace(name=status)
        self.ds_persist = resident
        self.done: list[object] = []

    def partition(self) -> None:
        self.done.append("freed")

    def all_gather(self, together: list[Weight]) -> None:
        for each in together:
            each.done.append(("gathered", len(together)))


def test_after_an_evaluation_weights_are_as_a_step_leaves_them() -> None:
    """Intel's DeepSpeed also frees what is resident, while it records evaluations."""
    kept, freed, ahead = Weight("AVAILABLE"), Weight("NOT_AVAILABLE"), Weight("INFLIGHT")
    resident = Weight("AVAILABLE", resident=True)
    lost = [Weight("NOT_AVAILABLE", resident=True) for _ in range(2)]
    model = SimpleNamespace(
        parameters=lambda: iter([kept, lost[0], freed, ahead, resident, lost[1]])
    )
    leave_as_a_step_does(model)  # type: ignore[arg-type]
    assert kept.done == ["freed"]
    assert [each.done for each in lost] == [[("gathered", 2)]] * 2
    assert freed.done == ahead.done == resident.done == []
