"""What a run is refused for before a device is opened: its strategy, and products in FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import (
    API_VERSION,
    FULL,
    Backend,
    Compiler,
    Graph,
    Level,
    RunFileError,
    StrategySpec,
    Support,
    UnsupportedError,
)
from anygauge.planning.memory_plan import plan_run
from anygauge.registry import Registry
from anygauge.strategies.shared.activations import offload_activations
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.training import setup
from anygauge.training.build_strategy import FP8 as CAPABILITY
from anygauge.training.build_strategy import check_backend, check_fp8, check_ranks, check_strategy
from anygauge_cpu.backend import CpuBackend
from tests.helpers.runs import run_file, trained_here


class Accumulates(Graph):
    accumulates = True


class Compiles(Graph):
    compiler = Compiler(backend="eager", regions="layer")


SPEC = StrategySpec(
    name="mine",
    factory="mine:Mine",
    api_version=API_VERSION,
    needs={"collectives": "it shards"},
    engine="turbine",
)


def toy(support: Support = FULL, engines: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(
        name="toy", support=lambda capability: support, unsupported_engines=engines or {}
    )


def test_a_device_that_lacks_what_it_needs_is_named_with_the_reason() -> None:
    check_backend(SPEC, toy())
    lacking = toy(Support(Level.NOT_WRITTEN_YET, "one card only"))
    with pytest.raises(UnsupportedError, match=r"'toy' lacks 'collectives'.*one card only"):
        check_backend(SPEC, lacking)
    check_backend(dataclasses.replace(SPEC, needs={}), lacking)


def test_an_engine_that_a_device_cannot_run_is_named_with_the_reason() -> None:
    refusing = toy(engines={"turbine": "no steam here"})
    with pytest.raises(UnsupportedError, match=r"'toy' cannot run 'turbine'.*no steam here"):
        check_backend(SPEC, refusing)
    check_backend(dataclasses.replace(SPEC, engine="another"), refusing)
    check_backend(dataclasses.replace(SPEC, engine=""), refusing)


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (Graph(), ""),
        (Accumulates(), "'cpu' collects operations into graphs, and each copy to the host"),
        (Compiles(), "'cpu' compiles layers together with what they keep"),
    ],
)
def test_activations_of_a_device_with_graphs_are_not_offloaded(
    graph: Graph, told: str, tmp_path: Path
) -> None:
    backend = CpuBackend()
    backend.graph = graph
    registry = Registry.load()

    def check(offloads: bool) -> None:
        file = run_file(tmp_path, train={"activation_offloading": offloads})
        check_strategy(load_run_file(file), registry, backend, 1)

    check(False)
    if not told:
        check(True)
        return
    with pytest.raises(UnsupportedError, match=rf"train\.activation_offloading: backend {told}"):
        check(True)


def test_a_run_keeps_activations_as_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def offload(model: Any, placement: Any) -> Any:
        found = offload_activations(model, placement)
        layers = list(decoder_layers(model))
        made.append((found, [layer.gradient_checkpointing for layer in layers]))
        return found

    monkeypatch.setattr(setup, "offload_activations", offload)
    plain = {"gradient_checkpointing": False}
    other = {"gradient_checkpointing": {"every": 2}, "activation_offloading": True}
    runs = []
    for name, train in (("plain", plain), ("other", other)):
        (tmp_path / name).mkdir()
        file = run_file(tmp_path / name, strategy={"name": "single"}, train=train)
        runs.append(trained_here(file))
    wanted, found = (run.steps("loss") for run in runs)
    assert found == pytest.approx(wanted, rel=1e-6)
    ((offloaded, recompute),) = made
    assert recompute == [True, False]
    assert offloaded.buffers.made > 0


def test_several_ranks_of_what_trains_in_one_process() -> None:
    registry = Registry.load()
    check_ranks(SPEC, 3, registry)
    spec = dataclasses.replace(SPEC, single_process=True)
    check_ranks(spec, 1, registry)
    told = (
        "in one process, but the run has 3 ranks; use --devices 1 and --nodes 1, or strategy.name"
    )
    with pytest.raises(RunFileError, match=f"{told}: zero"):
        check_ranks(spec, 3, registry)


FP8 = {"precision": {"fp8": True, "param_dtype": "bfloat16"}}


class Able(Backend):
    name = "able"
    device_type = "cpu"
    capabilities = {CAPABILITY: FULL, "bfloat16": FULL}


def run(tmp_path: Path, **changes: Any) -> RunFile:
    return load_run_file(run_file(tmp_path, **{**FP8, **changes}))


def check(asked: RunFile, backend: Backend) -> None:
    check_fp8(asked, Registry.load().find_strategy(asked.strategy.name).spec, backend)


@pytest.mark.parametrize(
    "strategy", [{"name": "single"}, {"name": "zero"}, {"name": "zero", "stage": 1}]
)
def test_it_is_taken_where_it_was_tried(tmp_path: Path, strategy: Mapping[str, Any]) -> None:
    check(run(tmp_path, strategy=strategy), Able())


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_device_without_it_says_why(tmp_path: Path, name: str) -> None:
    asked = run(tmp_path, strategy={"name": "single"})
    with pytest.raises(UnsupportedError, match=rf"backend '{name}' lacks 'fp8_products'.*gradient"):
        check(asked, Registry.load().create_backend(name))
    check(run(tmp_path, precision={"fp8": False}), Registry.load().create_backend(name))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"name": "fsdp"}}, "'fsdp': nobody has tried.*Use strategy.name: zero"),
        ({"strategy": {"name": "ddp"}}, "'ddp': nobody has tried"),
        ({"strategy": {"name": "zero", "offload": "optimizer"}}, "not tried with weights or state"),
        ({"adapter": {"r": 4, "dora": True}}, "and adapter.dora: DoRA.*Leave adapter.dora out"),
        ({"adapter": {"r": 4, "modules_to_save": ["lm_head"]}}, "and adapter.modules_to_save"),
    ],
    ids=["fsdp", "ddp", "offload", "dora", "modules_to_save"],
)
def test_what_does_not_go_with_it_is_named(
    tmp_path: Path, changes: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"precision.fp8.*{said}"):
        check(run(tmp_path, **changes), Able())


def test_it_cannot_be_planned(tmp_path: Path) -> None:
    registry = Registry.load()
    asked = run(tmp_path, strategy={"name": "single"})
    with pytest.raises(
        UnsupportedError, match=r"precision.fp8: .* cannot be planned. Plan without"
    ):
        plan_run(asked, registry, registry.create_backend("cpu"), 1)
