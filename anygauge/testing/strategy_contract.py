"""The kit of a strategy: losses, state, resume and bytes, against whole models on one rank.

``pytest --anygauge-strategy NAME`` runs it on the host's processors. A spec whose losses differ by
design declares how far, in `StrategySpec.tolerance`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import HOST_DEVICE, StrategySpec
from anygauge.registry import Registry
from anygauge.testing.check import CHOSEN_STRATEGY
from anygauge.testing.loop import Trained, prepare
from anygauge.testing.process import Subject, run_ranks
from anygauge.testing.trials import LoopTrials, ranks_of

WEIGHTS = "weights"
A_FEW_NUMBERS = 64
"""Bytes of norms and flags in a step, which no footprint speaks of."""

if CHOSEN_STRATEGY in os.environ:  # set by ``pytest --anygauge-strategy``, which collects this file

    class TestStrategy:
        """The strategy that the command line names."""

        name = os.environ[CHOSEN_STRATEGY]

        @pytest.fixture(scope="class")
        @classmethod
        def spec(cls) -> StrategySpec:
            """Of the strategy."""
            return Registry.load().find_strategy(cls.name).spec

        @pytest.fixture(scope="class")
        @classmethod
        def runs(cls, spec: StrategySpec, tmp_path_factory: pytest.TempPathFactory) -> LoopTrials:
            """Runs on the host, each made once."""
            folder: Path = tmp_path_factory.mktemp(f"strategy-{spec.name}")
            prepare(folder)
            return LoopTrials(subject=Subject(name=HOST_DEVICE), folder=folder, stated={})

        @pytest.fixture
        def ranks(self, spec: StrategySpec) -> int:
            """Two, or what it runs on."""
            return ranks_of(spec, 2)

        @pytest.fixture
        def whole(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> Trained:
            """Its undisturbed run, with checkpoints."""
            return runs.run("adapter", "float32", strategy=spec.name, ranks=ranks)

        def test_losses(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
            """Losses, norms and evaluations are those of one process, within its tolerance."""
            assert not (why := runs.trial("spread", spec=spec, ranks=ranks)), why

        def test_state(self, runs: LoopTrials, whole: Trained) -> None:
            """Its checkpoint is neutral: the tensors that one process writes, whole, in float32."""
            wanted = runs.run("adapter", "float32")
            mine, theirs = (_tensors(run.checkpoints[0]) for run in (whole, wanted))
            assert mine == theirs, sorted(set(mine.items()) ^ set(theirs.items()))[:4]

        def test_resume(
            self, spec: StrategySpec, runs: LoopTrials, ranks: int, whole: Trained
        ) -> None:
            """From one process's checkpoint and from its own it goes on where they were."""
            why = runs.trial("adapter", spec=spec, ranks=ranks, resumed=True)
            assert not why, why
            middle = whole.checkpoints[0]
            rest = runs.run("adapter", "float32", strategy=spec.name, ranks=ranks, resume=middle)
            wanted = whole.losses[-len(rest.losses) :]
            allowed = max(spec.tolerance, 1e-6)
            for step, (loss, due) in enumerate(zip(rest.losses, wanted, strict=True), start=1):
                assert abs(loss - due) <= allowed * abs(due), (
                    f"step {step} after its own checkpoint: the loss is {loss!r}, not {due!r}"
                )

        def test_bytes(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
            """A step sends what its footprint says, by collective, and a rank holds its weights."""
            run = runs.run("spread", "float32", strategy=spec.name, ranks=ranks)
            request, base = {"run": str(run.folder)}, runs.folder / "bytes"
            files, trouble = run_ranks(sent_and_said, request, runs.subject, base, ranks=ranks)
            assert not trouble, trouble
            for rank, file in enumerate(files):
                sent, said = json.loads(file.read_text(encoding="utf-8"))
                for name in {**sent, **said}:
                    found, due = sent.get(name, 0), said.get(name, 0)
                    assert abs(found - due) <= A_FEW_NUMBERS, (
                        f"{name}: rank {rank} has {found:,} bytes, footprint() says {due:,}"
                    )


def sent_and_said(request: Any) -> Any:
    """Collective -> bytes that this rank gives to it in a step, and those of its `WEIGHTS`: as
    counted while the run's engine makes its third step, and by its footprint."""
    from anygauge.config.resolved import read_run
    from anygauge.config.schema import resolve_precision
    from anygauge.models.factory import CausalModelFactory
    from anygauge.strategies.common import torch_dtype
    from anygauge.testing.bisect import CollectiveBytes, one_step, prepared
    from anygauge.training.strategy import create_strategy, workload_of

    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    run_folder = Path(request["run"])
    again = prepared(run_folder, request["rendezvous"])
    for step in range(3):  # the first ones set up what is no step's own, such as DDP's buckets
        with CollectiveBytes() as sent:
            one_step(again, step)
    run, registry = read_run(run_folder / "run.json"), Registry.load()
    backend = registry.create_backend(HOST_DEVICE)
    precision = resolve_precision(run.precision, backend.support)
    factory = CausalModelFactory.of(run, torch_dtype(precision.param_dtype))
    adapted = factory.adapt(factory.skeleton())
    workload = workload_of(run, registry, backend, precision, rank, ranks, adapted)
    said = create_strategy(registry, run).footprint(workload)
    return {**sent.bytes, WEIGHTS: held(again.loop.engine)}, {**said.sent, WEIGHTS: said.weights}


def held(engine: Any) -> int:
    """Bytes of the weights that this rank holds between steps: shards, where it has shards."""
    from torch import Tensor

    from anygauge.strategies.flat import FLAT

    flat = getattr(engine.model, FLAT, None)  # its parameters are views of what is gathered
    found = flat.held if flat else 0
    for each in engine.model.parameters():
        whole = each.to_local() if hasattr(each, "to_local") else each
        # An engine may keep its shard as an attribute, also beside one that stays whole.
        parts = [whole, *(value for value in vars(each).values() if isinstance(value, Tensor))]
        if not (flat and each in flat):
            found += sum(part.numel() * part.element_size() for part in parts if not part.is_meta)
    return int(found)


def _tensors(checkpoint: Path) -> dict[str, str]:
    """Name of each tensor of a checkpoint's state -> its type and shape."""
    found: dict[str, str] = {}
    for path in checkpoint.glob("state-*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: f"{each['dtype']} {each['shape']}" for name, each in header.items()}
    return found
