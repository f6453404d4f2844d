"""What the graph facet is for: cuts, limits, and graphs that are compiled once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from anygauge.testing.loop_checks import TrainRun, train
from anygauge.testing.process import Subject

LIMITS = (60, 100_000)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TrainRun]:
    """One run for each limit."""
    folder = tmp_path_factory.mktemp("limits")
    return {
        limit: train(
            Subject(name="lazy", options={"graph_limit": limit}),
            folder,
            f"limit{limit}",
            strategy="single",
            ranks=1,
            dtype="float32",
        )
        for limit in LIMITS
    }


def steps(run: TrainRun, field: str) -> list[float]:
    return [record[field] for record in run.metrics if "loss" in record]


def test_losses_are_the_same_for_each_limit(runs: dict[int, TrainRun]) -> None:
    wanted = runs[LIMITS[-1]].losses
    for run in runs.values():
        assert list(run.losses) == list(wanted)


def test_a_lower_limit_makes_more_and_smaller_graphs(runs: dict[int, TrainRun]) -> None:
    graphs = [steps(run, "graph_graphs")[-1] for run in runs.values()]
    assert graphs == sorted(graphs, reverse=True)
    assert graphs[0] > 3 * graphs[-1]
    largest = [steps(run, "graph_largest")[-1] for run in runs.values()]
    assert largest[0] == LIMITS[0], "graphs are as large as they may be, and no larger"
    assert largest[1] > LIMITS[0]


def test_nothing_is_compiled_after_warm_up(runs: dict[int, TrainRun]) -> None:
    for limit, run in runs.items():
        compiled = steps(run, "graph_compiled")
        assert compiled[-1] == compiled[-3], f"limit {limit}: {compiled}"
        cached = steps(run, "graph_cached")
        assert cached[-1] > cached[-3], "graphs were run, from the cache"


def test_the_optimizer_hands_two_operations_for_each_parameter_to_the_host(
    runs: dict[int, TrainRun],
) -> None:
    handed = steps(runs[LIMITS[-1]], "graph_host_operations")
    parameters = 2 * 2 * 7  # two matrices beside each of seven linear layers in two layers
    # Each gradient's norm is handed over, the copy that gives a parameter back, and some operations
    # of the loss and the layers, 34 by count; AdamW's lerp would be a third one of each parameter.
    assert handed[-1] - handed[-2] < 2 * parameters + 34 + parameters / 2


def test_weights_are_copies_of_their_masters() -> None:
    """Clipping, AdamW and the copy into the weights in one graph, after another graph."""
    differences = python(
        OPEN + "from anygauge.interface import Phase\n"
        "backend.graph.stop(); backend.graph.limit = 10**6; backend.graph.start()\n"
        "torch.manual_seed(0)\n"
        "weights = [torch.nn.Parameter(torch.randn(8, 8).to(device)) for _ in range(4)]\n"
        "masters = [torch.nn.Parameter(each.detach().clone()) for each in weights]\n"
        "optimizer = torch.optim.AdamW(masters, lr=0.01)\n"
        "x = torch.randn(5, 8).to(device)\n"
        "for each in weights: x = torch.nn.functional.silu(x @ each)\n"
        "x.pow(2).mean().backward()\n"
        "backend.graph.mark_step(Phase.BACKWARD)\n"
        "for master, each in zip(masters, weights): master.grad = each.grad\n"
        "torch.nn.utils.clip_grad_norm_(masters, 1.0)\n"
        "optimizer.step()\n"
        "with torch.no_grad():\n"
        "    for master, each in zip(masters, weights): each.copy_(master)\n"
        "backend.graph.mark_step(Phase.UPDATE)\n"
        "print(json.dumps([float((m - w).abs().max()) for m, w in zip(masters, weights)]))\n"
    )
    assert differences == [0, 0, 0, 0]


def python(code: str) -> Any:
    """The JSON that a process of its own prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


OPEN = (
    "import json, torch\n"
    "from anygauge.registry import Registry\n"
    "backend = Registry.load().create_backend('lazy', {'graph_limit': 5})\n"
    "device = backend.open()\n"
)
