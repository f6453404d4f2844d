"""Where a device's accumulating graph is cut in a step, by the order of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge.config.sections import CheckpointingSection
from anygauge.interface import Graph, Phase, ShapeKind, ShapePolicy
from anygauge.kernels.install_kernels import ModelKernels
from anygauge.kernels.kernel_plan import _on_graphs
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge.strategies.shared.common import mark_recomputation
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.single.engine import Single
from anygauge_kernels.linear_cross_entropy import chunked
from tests.helpers.build import batch_of, build_context, model_factory
from tests.helpers.runs import TINY


class RecordingGraph(Graph):
    """Cuts nothing; remembers what it was asked, between what else was called."""

    shapes = ShapePolicy(kind=ShapeKind.BUCKETED)

    def __init__(self, accumulates: bool = True) -> None:
        self.accumulates = accumulates
        self.calls: list[str] = []

    def mark_step(self, phase: Phase) -> None:
        self.calls.append(phase.value)


def factory(checkpointing: Any = True, kernels: ModelKernels | None = None) -> CausalModelFactory:
    return model_factory(
        TINY,
        attention="eager",
        kernels=kernels or ModelKernels(),
        gradient_checkpointing=checkpointing,
    )


def note_layers(model: Any, graph: RecordingGraph) -> None:
    """By a module within each: a layer's own hooks may stay outside of what is computed again."""
    for index, layer in enumerate(decoder_layers(model)):
        layer.input_layernorm.register_forward_pre_hook(
            lambda *_, index=index: graph.calls.append(f"layer {index}")
        )


def step(
    graph: RecordingGraph, checkpointing: Any = True, kernels: ModelKernels | None = None
) -> None:
    """One of strategy `single`."""
    backend = Registry.load().create_backend("cpu")
    backend.graph = graph
    backend.open(0)
    context = build_context(
        factory=factory(checkpointing, kernels),
        backend=backend,
        rank=0,
        world_size=1,
        micro_batch=1,
        max_norm=1.0,
    )
    engine = Single().build(context)
    note_layers(engine.model, graph)
    engine.run_step([batch_of(torch.arange(8)[None])], model_loss, 8)
    engine.update(1e-3, 1.0)
    backend.close()


AGAIN = ["recompute", "layer 1", "recompute", "layer 0"]
"""Of two layers, from the last to the first."""


@pytest.mark.parametrize(
    ("checkpointing", "accumulates", "again"),
    [
        pytest.param(True, True, AGAIN, id="before each layer that is computed again"),
        pytest.param(CheckpointingSection(every=2), True, AGAIN[2:], id="not before others"),
        pytest.param(False, True, [], id="activations are kept"),
        pytest.param(True, False, AGAIN[1::2], id="graphs do not accumulate"),
    ],
)
def test_a_graph_begins(checkpointing: Any, accumulates: bool, again: list[str]) -> None:
    graph = RecordingGraph(accumulates)
    step(graph, checkpointing)
    assert graph.calls == ["layer 0", "layer 1", "forward", *again, "backward", "update"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_forms_of_recomputation(reentrant: bool) -> None:
    graph = RecordingGraph()
    made = factory()
    backend = Registry.load().create_backend("cpu")
    backend.open(0)
    model: Any = made.adapt(made.skeleton())
    model.to_empty(device="cpu")
    made.checkpoint_activations(model, reentrant=reentrant)
    mark_recomputation(model, graph)
    note_layers(model, graph)
    model.train()
    if reentrant:
        model.enable_input_require_grads()
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    backend.close()
    assert graph.calls == ["layer 0", "layer 1", *AGAIN]


def test_each_chunk_of_the_loss_is_a_graph() -> None:
    graph = RecordingGraph()
    step(graph, False, ModelKernels(loss=_on_graphs(chunked(), graph)))
    # One chunk: a cut before it and one after it.
    assert graph.calls == ["layer 0", "layer 1", *["chunk"] * 2, "forward", "backward", "update"]
    fluid = RecordingGraph()
    fluid.shapes = ShapePolicy()
    step(fluid, False, ModelKernels(loss=_on_graphs(chunked(), fluid)))
    assert "chunk" not in fluid.calls


def test_a_kernel_that_knows_no_marks_is_given_none() -> None:
    def others(hidden: Any, weight: Any, targets: Any, *, skip_ignored: bool) -> dict[str, Any]:
        return {"skip_ignored": skip_ignored}

    assert _on_graphs(others, RecordingGraph())(1, 2, 3) == {"skip_ignored": False}
    assert _on_graphs(others, Graph())(1, 2, 3) == {"skip_ignored": True}
