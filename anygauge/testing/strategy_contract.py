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
from safetensors.torch import load_file

from anygauge.interface import HOST_DEVICE, StrategySpec
from anygauge.registry import Registry
from anygauge.testing.check import CHOSEN_STRATEGY
from anygauge.testing.loop_checks import LoopTrials
from anygauge.testing.process import Subject, run_ranks

WEIGHTS = "weights"
A_FEW_NUMBERS = 64
"""Bytes of norms and flags in a step, which no planner speaks of."""


class TestStrategy:
    """The strategy that the command line names."""

    name = os.environ.get(CHOSEN_STRATEGY, "")

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls) -> StrategySpec:
        """Return the strategy's spec."""
        return Registry.load().find_strategy(cls.name).spec

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory: pytest.TempPathFactory) -> LoopTrials:
        """Runs on the host, each made once."""
        folder = tmp_path_factory.mktemp(f"strategy-{cls.name}")
        return LoopTrials(subject=Subject(name=HOST_DEVICE), folder=folder)

    @pytest.fixture
    def ranks(self, spec: StrategySpec) -> int:
        """Two, or what it runs on."""
        return 1 if spec.single_process else 2

    def test_losses(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
        """Losses, norms and evaluations are those of one process, within its tolerance."""
        assert not (why := runs.trial("spread", spec=spec, ranks=ranks)), why

    def test_state(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
        """Its checkpoint is neutral: the tensors that one process writes, whole, in float32."""
        whole = runs.run("adapter", spec=spec, ranks=ranks)
        mine, theirs = (_tensors(run.checkpoints[0]) for run in (whole, runs.run("adapter")))
        assert mine == theirs, sorted(set(mine.items()) ^ set(theirs.items()))[:4]

    def test_resume(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
        """From one process's checkpoint and from its own it goes on where they were."""
        assert not (why := runs.trial("adapter", spec=spec, ranks=ranks, resumed=True)), why
        assert not (why := runs.try_resume(spec, ranks)), why

    def test_bytes(self, spec: StrategySpec, runs: LoopTrials, ranks: int) -> None:
        """A step sends what its planner says, by collective, and a rank holds its weights."""
        request = {"run": str(runs.run("spread", spec=spec, ranks=ranks).folder)}
        base = runs.folder / "bytes"
        files, trouble = run_ranks(sent_and_said, request, runs.subject, base, ranks=ranks)
        assert not trouble, trouble
        for rank, file in enumerate(files):
            sent, said = json.loads(file.read_text(encoding="utf-8"))
            if said is None:
                pytest.skip("it has no planner: plans take each of its ranks for one that is alone")
            for name in {**sent, **said}:
                found, due = sent.get(name, 0), said.get(name, 0)
                assert abs(found - due) <= A_FEW_NUMBERS, (
                    f"{name}: rank {rank} has {found:,} bytes, its planner says {due:,}"
                )


def sent_and_said(request: Any) -> Any:
    """Collective -> bytes that this rank gives to it in a step, and those of its `WEIGHTS`: as
    counted while the run's engine makes its third step, and by its planner: None if it has none."""
    from anygauge.interface import estimate as at
    from anygauge.testing.bisect import CollectiveBytes, one_step, prepare_run
    from anygauge.training.build_strategy import workload_of

    again = prepare_run(Path(request["run"]), request["rendezvous"])
    for step in range(3):  # the first ones set up what is no step's own, such as DDP's buckets
        with CollectiveBytes() as sent:
            one_step(again, step)
    counted = {**sent.bytes, WEIGHTS: held_bytes(again.engine)}
    planner = getattr(again.strategy, "planner", None)
    if planner is None:
        return counted, None
    skeleton = again.factory.adapt(again.factory.skeleton())
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = (again.loop.backend, again.precision, rank, ranks)
    said = planner.memory(workload_of(again.run, Registry.load(), *place, skeleton))
    return counted, {**said.bytes_sent, WEIGHTS: said.bytes_at(at.EVALUATION, at.WEIGHTS)}


def held_bytes(engine: Any) -> int:
    """Bytes of the weights that this rank holds between steps: shards, where it has shards."""
    from torch import Tensor

    from anygauge.strategies.shared.flat import FLAT

    flat = getattr(engine.model, FLAT, None)  # its parameters are views of what is gathered
    found = flat.num_bytes if flat else 0
    for each in engine.model.parameters():
        whole = each.to_local() if hasattr(each, "to_local") else each
        # An engine may keep its shard as an attribute, also beside one that stays whole.
        parts = [whole, *(value for value in vars(each).values() if isinstance(value, Tensor))]
        if not (flat and each in flat):
            found += sum(part.numel() * part.element_size() for part in parts if not part.is_meta)
    return int(found)


def _tensors(checkpoint: Path) -> dict[str, str]:
    """Name of each tensor of a checkpoint's state -> its type and shape."""
    files = [load_file(path) for path in checkpoint.glob("state-*.safetensors")]
    return {name: f"{each.dtype} {each.shape}" for file in files for name, each in file.items()}
