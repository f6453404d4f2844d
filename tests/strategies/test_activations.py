"""Which layers recompute, what they keep, and what of it lies on the host; see also the matrix."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from anygauge.config.sections import CheckpointingSection
from anygauge.interface import Activations, Backend, Engine, Share, UnsupportedError
from anygauge.kernels.loss import model_loss
from anygauge.models.recompute import recompute
from anygauge.registry import Registry
from anygauge.strategies.shared.activations import Offload, offload_activations
from anygauge.strategies.shared.materialize import decoder_layers
from tests.helpers.dispatched_operations import Operations
from tests.helpers.run_ranks import on_ranks
from tests.strategies.parity_rank import CONFIG, LENGTH, MICRO, ParityCase, built, placed, rows

LAYERS = CONFIG["num_hidden_layers"]
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "every second": {"recomputed": True, "every": 2},
    "selective": {"recomputed": True, "selective": True},
    "recomputed": {"recomputed": True},
    "offloaded": {"offloaded": True},
    "recomputed, offloaded": {"recomputed": True, "offloaded": True},
}


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = Registry.load().create_backend("cpu")
    found.open(0)
    return found


def forward(engine: Engine, device: str = "cpu") -> Tensor:
    ids, labels = rows(0)
    alone = ParityCase(strategy="single")
    batch = placed(alone, ids[:MICRO], labels[:MICRO], Share(0, 1), torch.device(device))
    engine.model.train()
    return model_loss(engine.model(**batch))


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        ({}, [1, 1, 1, 1]),
        ({"recomputed": True}, [2, 2, 2, 2]),
        ({"recomputed": True, "every": 2}, [2, 1, 2, 1]),
        ({"recomputed": True, "every": 3}, [2, 1, 1, 2]),
        ({"recomputed": True, "every": 9}, [2, 1, 1, 1]),
        ({"recomputed": True, "selective": True}, [2, 2, 2, 2]),
        ({"recomputed": True, "every": 2, "offloaded": True}, [2, 1, 2, 1]),
    ],
)
def test_layers_are_computed_again_as_the_run_says(
    given: dict[str, Any], computed: list[int], backend: Backend
) -> None:
    case = ParityCase(strategy="single", **given)
    engine, _, _ = built(case, backend, 0, 1)
    counts = Counter[int]()
    for index, layer in enumerate(decoder_layers(engine.model)):
        layer.get_submodule("mlp").register_forward_pre_hook(
            lambda *_, index=index: counts.update([index])
        )
    forward(engine).backward()
    assert [counts[index] for index in range(LAYERS)] == computed
    section = case.checkpointing
    every = section.every if isinstance(section, CheckpointingSection) else int(section)
    assert Activations(every=every).num_recomputed(LAYERS) == computed.count(2)


def test_selective_recomputation_makes_no_attention_and_no_large_product_again(
    backend: Backend,
) -> None:
    def in_backward(**given: Any) -> Counter[str]:
        engine, _, _ = built(ParityCase(strategy="single", **given), backend, 0, 1)
        loss = forward(engine)
        with Operations() as found:
            loss.backward()
        return Counter(name.partition(".")[0] for name, _ in found.graphs[0])

    kept = in_backward()
    again = in_backward(recomputed=True)
    selective = in_backward(recomputed=True, selective=True)
    attention = [name for name in again if "scaled_dot_product" in name and "backward" not in name]
    assert sum(again[name] for name in attention) == LAYERS, "the test sees attention"
    assert sum(selective[name] for name in attention) == 0
    # Of seven linear layers each, base and two factors; the last one's output nobody asks for.
    assert again["aten::mm"] - kept["aten::mm"] >= LAYERS * (7 * 3 - 2)
    assert 0 < selective["aten::mm"] - kept["aten::mm"] <= LAYERS * 7, "the adapter's second factor"
    assert selective["aten::silu"] == LAYERS, "all else is recomputed"


def bytes_kept(backend: Backend) -> dict[str, dict[str, int]]:
    """Of each way: what layers keep on a card for backward, and what is left after it."""
    found = {}
    for name, way in WAYS.items():
        engine, _, _ = built(ParityCase(strategy="single", **way), backend, 0, 1)
        before = backend.placement.memory().in_use
        loss = forward(engine, str(backend.placement.device))
        kept = backend.placement.memory().in_use - before
        loss.backward()
        del loss
        engine.model.zero_grad(set_to_none=True)
        found[name] = {"kept": kept, "left": backend.placement.memory().in_use - before}
        engine.close()
    return found


@pytest.mark.slow
def test_a_card_keeps_less() -> None:
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    cards = {"ANYGAUGE_SIM_LOCKS": "", "ANYGAUGE_SIM_CARDS": "1"}
    (found,) = on_ranks(bytes_kept, world=1, backend="sim", alone=False, environment=cards)
    assert all(each["left"] == 0 for each in found.values()), "nothing outlives backward"
    kept = {name: each["kept"] for name, each in found.items()}
    one_input = MICRO * LENGTH * CONFIG["hidden_size"] * 4
    assert kept["recomputed"] < kept["every second"] < kept["selective"] < kept["all"]
    half = (kept["all"] + kept["recomputed"]) / 2
    assert kept["every second"] == pytest.approx(half, rel=0.05)
    # A layer's input is all that is kept of it. The first layer's is a leaf: some machines hold it.
    moved = kept["recomputed"] - kept["recomputed, offloaded"]
    assert moved in ((LAYERS - 1) * one_input, LAYERS * one_input)
    assert kept["offloaded"] <= kept["recomputed, offloaded"] < 0.1 * kept["all"]


class KeptLayer(nn.Module):
    """Autograd keeps its input twice, its weight, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * x.T.reshape(32, 32).cos()


class KeptModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([KeptLayer(), KeptLayer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def gradients(model: KeptModel, times: int = 1) -> list[Tensor]:
    x = torch.linspace(-1, 1, 1024).reshape(32, 32).requires_grad_()
    loss = model(x)
    for turn in range(times):
        loss.backward(retain_graph=turn < times - 1)
    assert x.grad is not None
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_are_the_same_also_of_a_graph_that_is_retained(
    times: int, backend: Backend
) -> None:
    wanted = gradients(KeptModel(), times)
    offloaded = KeptModel()
    offload_activations(offloaded, backend.placement)
    for _ in range(2):  # the second time in memory that is used again
        assert all(map(torch.equal, gradients(offloaded, times), wanted))


def test_a_tensor_goes_to_the_host_once_and_a_weight_never(backend: Backend) -> None:
    model = KeptModel()
    offload = offload_activations(model, backend.placement)
    with torch.no_grad():
        model(torch.ones(32, 32))
    assert offload.buffers.made == 0, "without gradients nothing moves"
    gradients(model)
    # Of each layer: the input, of which two views are kept, the product, and the result's factors.
    assert offload.buffers.made == 2 * 4
    for _ in range(3):
        gradients(model)
    assert offload.buffers.made == 2 * 4, "buffers are used again"


def test_what_changes_in_place_is_kept_as_it_was(backend: Backend) -> None:
    class Changes(KeptLayer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            first = y.sin()
            with torch.no_grad():
                y.mul_(2)
            return first * y.cos()

    x, layer = torch.ones(32, 32), Changes()
    y = layer.linear(x)
    (y.sin() * (y + y.detach()).cos()).sum().backward()
    expected, layer.linear.weight.grad = layer.linear.weight.grad, None
    Offload(backend.placement).wrap(layer, layer.forward)(x).sum().backward()
    torch.testing.assert_close(layer.linear.weight.grad, expected)


def test_a_tensor_made_of_others_is_offloaded_by_its_parts(backend: Backend) -> None:
    offload = Offload(backend.placement)
    layer = nn.Identity()
    parts = [torch.randn(32, 32, requires_grad=True) for _ in range(2)]
    both = TwoTensor(*parts).requires_grad_()
    offload.wrap(layer, torch.sin)(both).sum().backward()
    assert offload.buffers.made == 2
    assert isinstance(both.grad, TwoTensor)
    torch.testing.assert_close(both.grad.b, parts[1].detach().cos())


def test_a_model_that_cannot_recompute_as_asked_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Model does not support it\. Set"):
        recompute(KeptModel(), Activations(every=1))
    together = SimpleNamespace(
        supports_gradient_checkpointing=True,
        activation_checkpointing_enable=lambda **_: None,
        modules=lambda: iter(()),
    )
    with pytest.raises(UnsupportedError, match="recompute together or not at all"):
        recompute(together, Activations(every=2))
    with pytest.raises(UnsupportedError, match="reentrant form"):
        recompute(KeptModel(), Activations(every=1, selective=True), reentrant=True)
