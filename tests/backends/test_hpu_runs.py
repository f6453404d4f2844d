"""Real runs through the `hpu` backend on the stand-in for Gaudi's software: what is called, when.

The stand-in is strict about names, arguments and modes, and its tensors are never on the host; it
says nothing of Gaudi's speed or numerics.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gaudi import calls, standin_environment, standin_site
from tests.helpers.runs import Run, run_file, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("anygauge_sim") is None,
    reason="the stand-in's tensors live on simulated cards (make plugins)",
)

STEPS = 2
ACCUMULATION = 2
RANKS = 2


class Trained:
    """A run that ended well, and what each of its ranks called."""

    def __init__(self, run: Run, record: Path) -> None:
        self.run = run
        self.calls = [calls(record, rank) for rank in range(RANKS)]

    def count(self, name: str) -> list[int]:
        """How often each rank called it."""
        return [sum(call[0] == name for call in each) for each in self.calls]


def trained(folder: Path, name: str, *, version: str = "1.20.0", **options: Any) -> Trained:
    record = folder / f"{name}-record"
    site = folder / f"standin-{version}"
    if not site.exists():
        standin_site(folder, version)
    path = run_file(
        folder,
        name=name,
        backend="hpu",
        backend_options=options,
        launch={"devices": RANKS},
        adapter={"rank": 4, "dropout": 0.0},
        precision={"compute": "bfloat16"},
        train={
            "steps": STEPS,
            "global_batch": RANKS * ACCUMULATION,
            "micro_batch": 1,
            "gradient_checkpointing": True,
        },
    )
    run = train(path, environment=standin_environment(site, record))
    assert run.status == 0, run.out + run.err
    return Trained(run, record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gaudi")


@pytest.fixture(scope="module")
def lazy(folder: Path) -> Iterator[Trained]:
    yield trained(folder, "lazy", graph_limit=10, attention="softmax")


def test_graphs_end_after_each_backward_and_update(lazy: Trained) -> None:
    assert lazy.count("mark_step") == [STEPS * (ACCUMULATION + 1)] * RANKS
    assert lazy.count("refused") == [0] * RANKS


def test_a_step_calls_in_order(lazy: Trained) -> None:
    """Gradients are reduced in backward; the graph ends after it; weights are released after a
    synchronisation; the norm is reduced over ranks in the update, whose graph ends last."""
    for each in lazy.calls:
        names = [call[0] if call[0] != "collective" else call[1] for call in each]
        order = [
            name
            for name, _ in itertools.groupby(names)
            if name in ("reduce_scatter_tensor", "mark_step", "all_reduce")
        ]
        micro_step = ["reduce_scatter_tensor", "mark_step"]
        update = ["all_reduce", "mark_step"]
        found = order[order.index("reduce_scatter_tensor") :]
        step = [*micro_step * ACCUMULATION, *update]
        assert found[: len(step)] == step


def test_cards_are_taken_by_their_module(lazy: Trained) -> None:
    assert [[c[1] for c in each if c[0] == "acquire"] for each in lazy.calls] == [["0"], ["1"]]
    assert [each[0] for each in lazy.calls] == [["load", "lazy"]] * RANKS


def test_groups_are_made_without_what_is_gone(lazy: Trained) -> None:
    # A wrong argument would have ended the run; the control group is the host's.
    made = [(c[0], c[1]) for c in lazy.calls[0] if c[0].endswith("group")]
    assert made[:2] == [("init_process_group", "hccl"), ("new_group", "gloo")]


def test_norms_are_fused_and_attention_is_not(lazy: Trained) -> None:
    assert min(lazy.count("FusedRMSNorm")) > 0
    assert lazy.count("FusedSDPA") == [0] * RANKS
    assert "gaudi_softmax_bf16" in lazy.run.out
    assert "; 5 of 5 norms fused" in lazy.run.out
    assert lazy.run.steps("graph_compiled")[-1] > 0


def test_without_synchronised_release_there_are_only_the_meters(
    lazy: Trained, folder: Path
) -> None:
    other = trained(folder, "unsynchronised", attention="softmax", sync_on_release=False)
    assert min(lazy.count("synchronize")) > 10 * max(other.count("synchronize"))
    assert other.run.steps("loss") == lazy.run.steps("loss")


def test_forward_and_backward_apart(lazy: Trained, folder: Path) -> None:
    other = trained(folder, "split", attention="fused", split_forward_backward=True)
    # And once after the forward that proves the saved adapter.
    assert other.count("mark_step") == [STEPS * (2 * ACCUMULATION + 1) + 1] * RANKS
    assert min(other.count("FusedSDPA")) > 0
    assert other.run.steps("loss") == pytest.approx(lazy.run.steps("loss"), rel=1e-3)


@pytest.mark.slow
def test_compile_mode_asks_for_regions_and_marks_nothing(lazy: Trained, folder: Path) -> None:
    compiled = trained(folder, "compiled", version="1.21.0", attention="softmax")
    assert [each[0] for each in compiled.calls] == [["load", "eager"]] * RANKS
    assert min(compiled.count("compile")) > 0
    assert compiled.count("mark_step") == compiled.count("refused") == [0] * RANKS
    assert compiled.run.steps("loss") == pytest.approx(lazy.run.steps("loss"), rel=1e-3)


def test_stock_torch_is_refused_in_lazy_mode(folder: Path) -> None:
    site = folder / "standin-1.20.0"
    if not site.exists():
        standin_site(folder)
    environment = standin_environment(site, folder / "none")
    environment["HABANA_STANDIN_STOCK_TORCH"] = "1"
    path = run_file(folder, name="stock", backend="hpu", strategy={"name": "single"})
    run = train(path, environment=environment)
    assert run.status != 0
    assert "lazy mode needs Intel's build of torch" in run.err
    assert "Traceback" not in run.err
