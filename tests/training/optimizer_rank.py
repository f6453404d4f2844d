"""Trains a tiny model with each optimizer, in one process and under ZeRO; run as a script.

``optimizer_rank.py OUTPUT``: losses, rates and the shapes that each optimizer saw, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection
from anygauge.config.sections import OptimizerSection
from anygauge.interface import Backend, UnsupportedError
from anygauge.interface.strategy import Strategy
from anygauge.kernels.loss import model_loss
from anygauge.registry import Registry
from anygauge.strategies.single import Single
from anygauge.strategies.zero import Zero
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import batch_of, build_context, model_factory
from tests.helpers.runs import TINY

STEPS = 4
SECTIONS = {
    name: OptimizerSection(
        name=name,
        lr=lr,
        weight_decay=0.1,
        loraplus_lr_ratio=4.0,
    )
    for name, lr in (
        ("adamw", 5e-3),
        ("adamw_8bit", 5e-3),
        ("lion", 1e-3),
        ("sgd", 0.02),
        ("adafactor", 0.1),
    )
}
STRATEGIES: dict[str, Strategy] = {
    "single": Single(),
    "stage 0": Zero(ZeroOptions(stage=0)),
    "stage 1": Zero(ZeroOptions(stage=1)),
    "stage 3": Zero(ZeroOptions(stage=3)),
}


def train(section: OptimizerSection, strategy: Strategy, backend: Backend) -> dict[str, Any]:
    made: list[torch.optim.Optimizer] = []
    factory = optimizer_factory(section)

    def optimizer(parameters: Any, shapes: Any = None, /) -> torch.optim.Optimizer:
        made.append(factory(parameters, shapes))
        return made[0]

    engine = strategy.build(
        build_context(
            factory=model_factory(TINY, AdapterSection(r=16), attention="eager"),
            optimizer=optimizer,
            backend=backend,
            rank=0,
            world_size=1,
            micro_batch=1,
            max_norm=1.0,
        )
    )
    ids = torch.arange(3, 35)[None]
    batch = batch_of(ids)
    losses, error = [], ""
    try:
        for step in range(STEPS):
            result = engine.run_step([batch], model_loss, 31)
            losses.append(float(result.loss_sums[0]) / 31)
            engine.update(section.lr * (1 + step), 1.0)
    except UnsupportedError as refusal:
        error = str(refusal)
    outcome = {
        "losses": losses,
        "error": error,
        "rates": [[g["lr"], g["lr_scale"], g["weight_decay"]] for g in made[0].param_groups],
        "bits": sorted({str(t.dtype) for s in made[0].state.values() for t in _tensors(s)}),
    }
    engine.close()
    return outcome


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [t for t in state.values() if isinstance(t, torch.Tensor)]


def main(output: Path) -> None:
    backend = Registry.load().create_backend("cpu")
    device = backend.open(0)
    backend.collectives.open(
        rendezvous=os.environ["RENDEZVOUS"], rank=0, world_size=1, timeout_s=60, device=device
    )
    results = {
        name: {title: train(section, spread, backend) for title, spread in STRATEGIES.items()}
        for name, section in SECTIONS.items()
    }
    backend.close()
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
