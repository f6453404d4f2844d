"""The kit of a strategy: losses, state, resume and bytes, against whole models on one rank.

``pytest --anygauge-strategy NAME`` runs it on the host's processors. A spec whose losses differ by
design declares how far, in `StrategySpec.tolerance`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from anygauge.interface import HOST_DEVICE, StrategySpec
from anygauge.registry import Registry
from anygauge.testing.check import CHOSEN_STRATEGY
from anygauge.testing.loop import prepare
from anygauge.testing.process import Subject
from anygauge.testing.trials import LoopTrials, ranks_of
from anygauge.testing.watch import answer, answer_of

MODULE = "anygauge.testing.strategy_contract"
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

        def test_losses(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
            """Losses, norms and evaluations are those of one process, within its tolerance."""
            assert not (why := runs.spread(spec, ranks)), why

        def test_state(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
            """Its checkpoint is neutral: the tensors that one process writes, whole, in float32."""
            found = runs.run("adapter", "float32", strategy=spec.name, ranks=ranks)
            wanted = runs.run("adapter", "float32")
            mine, theirs = (_tensors(run.checkpoints[0]) for run in (found, wanted))
            assert mine == theirs, sorted(set(mine.items()) ^ set(theirs.items()))[:4]

        def test_resume(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
            """From one process's checkpoint and from its own it goes on where they were."""
            assert not (why := runs.resumed_on(spec, ranks)), why
            whole = runs.run("adapter", "float32", strategy=spec.name, ranks=ranks)
            middle = whole.checkpoints[0]
            rest = runs.run("adapter", "float32", strategy=spec.name, ranks=ranks, resume=middle)
            wanted = list(whole.losses)[-len(rest.losses) :]
            allowed = max(spec.tolerance, 1e-6)
            for step, (loss, due) in enumerate(zip(rest.losses, wanted, strict=True), start=1):
                assert abs(loss - due) <= allowed * abs(due), (
                    f"step {step} after its own checkpoint: the loss is {loss!r}, not {due!r}"
                )

        def test_bytes(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
            """What its planner says that a step sends is what its footprint says, by collective."""
            run = runs.run("spread", "float32", strategy=spec.name, ranks=ranks)
            request = [str(run.folder / "run.json"), ranks]
            others = {name: value for name, value in os.environ.items() if name != CHOSEN_STRATEGY}
            found = answer_of(("-m", MODULE), request, others, "the bytes of a step", 600)
            if found is None:
                pytest.skip("it has no planner: plans use its footprint")
            sent, said = found
            for name in {**sent, **said}:
                planned, due = sent.get(name, 0), said.get(name, 0)
                assert abs(planned - due) <= A_FEW_NUMBERS, (
                    f"{name}: a rank gives {planned:,.0f} bytes in a step by its planner; "
                    f"footprint() says {due:,}"
                )


def sent_and_said(path: str, ranks: int) -> tuple[dict[str, float], dict[str, int]] | None:
    """Collective -> bytes that the first rank gives to it in a step: by its planner, and by its
    footprint; None: it has no planner. In a process of its own."""
    from anygauge.config.resolved import read_run
    from anygauge.config.schema import resolve_precision
    from anygauge.models.factory import CausalModelFactory
    from anygauge.strategies.common import torch_dtype
    from anygauge.strategies.footprint import memory_of
    from anygauge.training.strategy import create_strategy, workload_of

    run, registry = read_run(Path(path)), Registry.load()
    backend = registry.create_backend(HOST_DEVICE)
    strategy = create_strategy(registry, run)
    if getattr(strategy, "planner", None) is None:
        return None
    precision = resolve_precision(run.precision, backend.support)
    factory = CausalModelFactory.of(run, torch_dtype(precision.param_dtype))
    adapted = factory.adapt(factory.skeleton())
    workload = workload_of(run, registry, backend, precision, 0, ranks, adapted)
    sent: defaultdict[str, float] = defaultdict(float)
    for one in memory_of(strategy, workload).traffic:
        sent[one.operation] += one.bytes
    return dict(sent), dict(strategy.footprint(workload).sent)


def _tensors(checkpoint: Path) -> dict[str, str]:
    """Name of each tensor of a checkpoint's state -> its type and shape."""
    found: dict[str, str] = {}
    for path in checkpoint.glob("state-*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: f"{each['dtype']} {each['shape']}" for name, each in header.items()}
    return found


if __name__ == "__main__":
    answer(sent_and_said(*json.load(sys.stdin)))
