"""Real runs through the `hpu` backend on the stand-in for Gaudi's software: what is called, when.

The stand-in is strict about names, arguments and modes, and its tensors are never on the host; it
says nothing of Gaudi's speed or numerics.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.strategies.zero.deepspeed_versions import (
    needs_reentrant_checkpointing,
    skips_non_finite,
)
from tests.helpers.child_processes import printed
from tests.helpers.gaudi import calls, needs_cards, standin_environment, standin_site
from tests.helpers.runs import Run, merged, run_file, train

pytestmark = needs_cards

EAGER = Path(__file__).parents[2] / "examples/llama2-70b-lora-gaudi2-eager.yaml"
STEPS = 2
ACCUMULATION = 2
RANKS = 2
IN_A_MICRO_STEP = 2 + 2
"""Marks before its backward ends: around the loss's one chunk, and before each of the two layers is
computed again."""
IN_AN_UPDATE = 2
"""Marks of the library's own AdamW, around its one group."""


class TrainedOnStandIn:
    """A run that ended well, and what each of its ranks called."""

    def __init__(self, run: Run, record: Path, ranks: int = RANKS) -> None:
        self.run = run
        self.calls = [calls(record, rank) for rank in range(ranks)]

    def count(self, name: str) -> list[int]:
        """How often each rank called it."""
        return [sum(call[0] == name for call in each) for each in self.calls]

    def graphs(self) -> list[list[list[Any]]]:
        """Of each rank: of every graph that ended its operations, "new" or "reused", why it ended,
        and whether the host waited."""
        return [[call[1:] for call in each if call[0] == "graph"] for each in self.calls]


def trained(
    folder: Path,
    name: str,
    *,
    version: str = "1.20.0",
    changes: Mapping[str, Any] | None = None,
    ranks: int = RANKS,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> TrainedOnStandIn:
    record = folder / f"{name}-record"
    site = standin_site(folder, version)
    fields = {
        "name": name,
        "backend": "hpu",
        "backend_options": options,
        "launch": {"devices": ranks},
        "adapter": {"r": 4, "dropout": 0.0},
        "precision": {"param_dtype": "bfloat16"},
        "train": {
            "steps": STEPS,
            "global_batch_size": ranks * ACCUMULATION,
            "micro_batch_size": 1,
            "gradient_checkpointing": True,
        },
    }
    if "strategy" not in (changes or {}):
        fields["strategy"] = {"name": "zero", "reentrant": True}
    path = run_file(folder, **merged(fields, changes or {}))
    run = train(path, environment={**standin_environment(site, record), **(variables or {})})
    assert run.status == 0, run.out + run.err
    return TrainedOnStandIn(run, record, ranks)


def refused(
    folder: Path, name: str, *, variables: Mapping[str, str] | None = None, **fields: Any
) -> str:
    """What a run prints that is refused, on one line."""
    path = run_file(folder, name=name, backend="hpu", **fields)
    environment = standin_environment(standin_site(folder), folder / f"{name}-record")
    run = train(path, environment={**environment, **(variables or {})})
    assert run.status == 1, run.out + run.err
    assert "Traceback" not in run.out + run.err
    return " ".join((run.out + run.err).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gaudi")


@pytest.fixture(scope="module")
def lazy(folder: Path) -> Iterator[TrainedOnStandIn]:
    yield trained(folder, "lazy", attention="softmax", sync_on_release=True)


def test_each_rank_takes_its_card_and_ends_its_graphs(lazy: TrainedOnStandIn) -> None:
    assert [[c[1] for c in each if c[0] == "acquire"] for each in lazy.calls] == [["0"], ["1"]]
    assert [each[0] for each in lazy.calls] == [["load", "lazy"]] * RANKS
    # A wrong argument would have ended the run; the control group is the host's.
    made = [(c[0], c[1]) for c in lazy.calls[0] if c[0].endswith("group")]
    assert made[:2] == [("init_process_group", "hccl"), ("new_group", "gloo")]
    marks = ACCUMULATION * (IN_A_MICRO_STEP + 1) + IN_AN_UPDATE + 1
    assert lazy.count("mark_step") == [STEPS * marks] * RANKS
    assert lazy.count("refused") == [0] * RANKS


def test_a_step_calls_in_order(lazy: TrainedOnStandIn) -> None:
    """Graphs end around the loss and before each layer's recomputation; gradients are reduced in
    backward, after which the graph ends; weights are released after a synchronization; the norm is
    reduced over ranks in the update, whose graph ends last."""
    for each in lazy.calls:
        names = [call[0] if call[0] != "collective" else call[1] for call in each]
        order = [
            name
            for name, _ in itertools.groupby(names)
            if name in ("reduce_scatter_tensor", "mark_step", "all_reduce")
        ]
        micro_step = [*["mark_step"] * IN_A_MICRO_STEP, "reduce_scatter_tensor", "mark_step"]
        # Older releases of DeepSpeed do not look whether the gradient is finite; then we do.
        reduced = ["all_reduce"] * (1 if skips_non_finite() else 2)
        update = [*reduced, *["mark_step"] * IN_AN_UPDATE, "mark_step"]
        found = order[order.index("mark_step") :]
        step = [*micro_step * ACCUMULATION, *update]
        assert found[: len(step)] == step


def test_the_model_library_replaces_nothing_in_torch(lazy: TrainedOnStandIn, folder: Path) -> None:
    """Its predicate for the device does, where it is asked; a run never asks it."""
    assert [[c[1] for c in each if c[0] == "patched"] for each in lazy.calls] == [[[]]] * RANKS
    site, record = standin_site(folder), folder / "asked-predicate"
    code = (
        "import habana_frameworks.torch\n"
        "from transformers.utils import is_torch_hpu_available\n"
        "assert is_torch_hpu_available()"
    )
    printed(code, environment={**standin_environment(site, record), "PT_HPU_LAZY_MODE": "1"})
    (patched,) = (call[1] for call in calls(record, 0) if call[0] == "patched")
    assert {"gather", "scatter", "compile"} <= set(patched)


def test_norms_are_fused_and_attention_is_not(lazy: TrainedOnStandIn) -> None:
    assert min(lazy.count("FusedRMSNorm")) > 0
    assert min(lazy.count("RotaryPosEmbeddingHelperV2")) > 0
    assert lazy.count("FusedSDPA") == [0] * RANKS
    assert "gaudi_softmax_bf16" in lazy.run.out
    assert "; 5 of 5 norms fused; 2 of 2 rotations fused" in lazy.run.out
    assert "FP8" not in lazy.run.out
    assert lazy.run.steps("graph_compiled")[-1] > 0


@pytest.mark.slow
def test_by_default_only_the_meters_wait_for_the_device(
    lazy: TrainedOnStandIn, folder: Path
) -> None:
    other = trained(folder, "unsynchronized", attention="softmax")
    assert min(lazy.count("synchronize")) > 10 * max(other.count("synchronize"))
    assert other.run.steps("loss") == lazy.run.steps("loss")


@pytest.mark.slow
def test_forward_and_backward_apart(lazy: TrainedOnStandIn, folder: Path) -> None:
    other = trained(folder, "split", attention="fused", split_forward_backward=True)
    # And once after the forward that proves the saved adapter.
    marks = ACCUMULATION * (IN_A_MICRO_STEP + 2) + IN_AN_UPDATE + 1
    assert other.count("mark_step") == [STEPS * marks + 1] * RANKS
    assert min(other.count("FusedSDPA")) > 0
    # Rows are padded on the right: the kernel is causal alone, without a mask.
    found = {tuple(c[2:]) for each in other.calls for c in each if c[0] == "FusedSDPA"}
    assert found == {(False, 0.0, True, "none", False)}
    assert other.run.steps("loss") == pytest.approx(lazy.run.steps("loss"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["model", "bridge"])
def test_the_librarys_class_of_parameters_changes_no_loss(folder: Path, source: str) -> None:
    """Its module hooks and its weight sharing, on by default in lazy mode; once as the stand-in
    models them, once by the bridge's own files, which replace more of torch."""
    checkout = os.environ.get("ANYGAUGE_GAUDI_SOURCE")
    if source == "bridge" and not checkout:
        pytest.skip("ANYGAUGE_GAUDI_SOURCE names no checkout of gaudi-pytorch-bridge")
    neither = {"ANYGAUGE_GAUDI_SOURCE": "", "PT_HPU_WEIGHT_SHARING": "0"}
    given = {"ANYGAUGE_GAUDI_SOURCE": checkout or "" if source == "bridge" else ""}
    without, shared = (
        trained(folder, f"sharing-{source}-{name}", attention="softmax", variables=variables)
        for name, variables in (("off", neither), ("on", {**given, "PT_HPU_WEIGHT_SHARING": "1"}))
    )
    losses = [[f"{loss:.4f}" for loss in each.run.steps("loss")] for each in (without, shared)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    loaded = {tuple(c) for each in shared.calls for c in each if c[0].startswith(("over", "weig"))}
    assert loaded == {("overwrites", source), ("weight_sharing", source)}
    assert without.count("weight_sharing") == [0] * RANKS


LIMIT = 10


@pytest.fixture(scope="module")
def limited(folder: Path) -> TrainedOnStandIn:
    return trained(folder, "limited", attention="softmax", graph_limit=LIMIT)


@pytest.mark.slow
def test_a_limit_cuts_graphs_into_pieces(lazy: TrainedOnStandIn, limited: TrainedOnStandIn) -> None:
    for whole, cut in zip(lazy.graphs(), limited.graphs(), strict=True):
        assert max(operations for operations, *_ in whole) > LIMIT
        # Where the limit has just ended one, there is none left for a mark to end.
        assert "limit" in {r for _, _, r, _ in cut} - {r for _, _, r, _ in whole}
        assert {r for _, _, r, _ in cut} <= {*(r for _, _, r, _ in whole), "limit"}
        assert {operations for operations, _, reason, _ in cut if reason == "limit"} == {LIMIT}
        # The same operations, and none is lost.
        assert sum(each[0] for each in cut) == sum(each[0] for each in whole)
        assert max(operations for operations, *_ in cut) == LIMIT
        assert not any(waited for *_, waited in cut)
    assert limited.run.steps("graph_compiled")[-1] > lazy.run.steps("graph_compiled")[-1]
    assert limited.run.steps("loss") == lazy.run.steps("loss")


@pytest.mark.slow
def test_a_limit_may_wait_for_what_it_cuts(limited: TrainedOnStandIn, folder: Path) -> None:
    other = trained(
        folder, "waiting", attention="softmax", graph_limit=LIMIT, graph_limit_sync=True
    )
    assert [[g[0] for g in each] for each in other.graphs()] == [
        [g[0] for g in each] for each in limited.graphs()
    ]
    for each in other.graphs():
        assert all(waited == (reason == "limit") for _, _, reason, waited in each)


@pytest.mark.slow
def test_shapes_are_counted_and_fewer_buckets_make_fewer(folder: Path) -> None:
    """The longest row has 96 tokens; buckets are whole multiples of 32. A rank that is alone has a
    width for each micro-batch, several have one for each step."""
    steps = {"train": {"steps": 6}}
    one, several = (
        trained(folder, f"buckets-{n}", ranks=1, attention="softmax", changes=steps, buckets=n)
        for n in (1, 8)
    )
    assert one.run.steps("shapes") == [1] * 6
    seen = several.run.steps("shapes")
    assert seen == sorted(seen) and 1 < seen[-1] <= 3


@pytest.mark.slow
def test_a_recipe_cache_is_passed_on(folder: Path, lazy: TrainedOnStandIn) -> None:
    cached = trained(
        folder, "cached", attention="softmax", recipe_cache="/tmp/recipes", recipe_cache_mb=64
    )
    name = "PT_HPU_RECIPE_CACHE_CONFIG"
    for each, without in zip(cached.calls, lazy.calls, strict=True):
        (variables,) = (call[1] for call in each if call[0] == "variables")
        assert variables[name].startswith("/tmp/recipes,") and variables[name].endswith(",64")
        (variables,) = (call[1] for call in without if call[0] == "variables")
        assert name not in variables


@pytest.mark.slow
def test_norms_of_the_model_are_not_fused(folder: Path, lazy: TrainedOnStandIn) -> None:
    plain = trained(folder, "plain", attention="softmax", rms_norm="reference")
    assert plain.count("FusedRMSNorm") == [0] * RANKS
    assert plain.run.steps("loss") == pytest.approx(lazy.run.steps("loss"), rel=1e-3)


SINGLE = {
    "strategy": {"name": "single"},
    "precision": {"param_dtype": "float32"},
    "train": {"global_batch_size": ACCUMULATION, "max_grad_norm": 0.5},
}
"""A clipping norm that every gradient exceeds."""


@pytest.fixture(scope="module")
def fused(folder: Path) -> TrainedOnStandIn:
    return trained(folder, "fused-update", ranks=1, attention="softmax", changes=SINGLE)


def test_updates_by_the_library_where_parameters_are_whole(fused: TrainedOnStandIn) -> None:
    # One group of matrices; the library marks a step before and after each of its calls.
    assert fused.count("FusedAdamW") == fused.count("FusedClipNorm") == [STEPS]
    marks = [c[0] for c in fused.calls[0] if c[0] in ("FusedAdamW", "FusedClipNorm", "mark_step")]
    clipped = marks.index("FusedClipNorm")
    assert marks[clipped - 1 : clipped + 6] == [
        *("mark_step", "FusedClipNorm", "mark_step"),
        *("mark_step", "FusedAdamW", "mark_step"),
        "mark_step",
    ]


@pytest.mark.slow
def test_updates_by_the_library_are_torchs(fused: TrainedOnStandIn, folder: Path) -> None:
    named = {"kernels": {"adamw": "reference", "clip_grad_norm": "reference"}}
    plain = trained(folder, "plain-update", ranks=1, attention="softmax", changes=SINGLE | named)
    assert plain.count("FusedAdamW") == plain.count("FusedClipNorm") == [0]
    assert fused.run.steps("grad_norm") == pytest.approx(plain.run.steps("grad_norm"), rel=1e-4)
    assert fused.run.steps("loss") == pytest.approx(plain.run.steps("loss"), rel=1e-5)


def test_under_zero_the_library_updates_and_deepspeed_clips(
    lazy: TrainedOnStandIn, folder: Path
) -> None:
    assert lazy.count("FusedAdamW") == [STEPS] * RANKS
    assert lazy.count("FusedClipNorm") == [0] * RANKS
    said = refused(
        folder,
        "asked",
        strategy={"name": "zero", "reentrant": True},
        kernels={"clip_grad_norm": "gaudi_fused"},
    )
    assert "kernels.clip_grad_norm: 'gaudi_fused' would never be called: DeepSpeed" in said


@pytest.mark.slow
def test_the_librarys_update_under_zero_is_torchs(lazy: TrainedOnStandIn, folder: Path) -> None:
    named = {"kernels": {"adamw": "reference"}}
    plain = trained(folder, "plain-zero", attention="softmax", changes=named)
    assert plain.count("FusedAdamW") == [0] * RANKS
    assert lazy.run.steps("loss") == pytest.approx(plain.run.steps("loss"), rel=1e-4)


@pytest.mark.slow
def test_eight_cards_in_lazy_mode(folder: Path) -> None:
    """The processes of a whole machine, on two cores: each takes its own card, all agree."""
    eight = trained(folder, "eight", ranks=8, attention="softmax", graph_limit=10)
    assert [[c[1] for c in each if c[0] == "acquire"] for each in eight.calls] == [
        [str(card)] for card in range(8)
    ]
    marks = ACCUMULATION * (IN_A_MICRO_STEP + 1) + IN_AN_UPDATE + 1
    assert eight.count("mark_step") == [STEPS * marks] * 8
    assert eight.count("refused") == [0] * 8
    collectives = [[c[1] for c in each if c[0] == "collective"] for each in eight.calls]
    assert all(each == collectives[0] for each in collectives)
    assert min(eight.count("synchronize")) > 0
    assert len(eight.run.steps("loss")) == STEPS


@pytest.mark.slow
def test_the_eager_recipe_asks_for_regions_and_marks_nothing(
    lazy: TrainedOnStandIn, folder: Path
) -> None:
    """In Gaudi's release of today; with transformers 5, where the installed set has it."""
    options = {**load_run_file(EAGER).backend_options, "recipe_cache": str(folder / "recipes")}
    compiled = trained(folder, "compiled", version="1.24.1.482", **options)
    assert [each[0] for each in compiled.calls] == [["load", "eager"]] * RANKS
    assert min(compiled.count("compile")) > 0
    assert compiled.count("mark_step") == compiled.count("refused") == [0] * RANKS
    assert compiled.run.steps("loss") == pytest.approx(lazy.run.steps("loss"), rel=1e-3)


def test_stock_torch_is_refused_in_lazy_mode(folder: Path) -> None:
    stock = {"HABANA_STANDIN_STOCK_TORCH": "1"}
    said = refused(folder, "stock", variables=stock, strategy={"name": "single"})
    assert "lazy mode needs Intel's build of torch" in said


@pytest.mark.skipif(needs_reentrant_checkpointing(), reason="this DeepSpeed is always reentrant")
def test_another_recomputation_than_intels_is_refused_in_lazy_mode(folder: Path) -> None:
    said = refused(folder, "other", strategy={"name": "zero"})
    assert "strategy.reentrant: false: with DeepSpeed" in said
    assert "Set strategy.reentrant: true, or use the DeepSpeed" in said
