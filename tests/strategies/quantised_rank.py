"""One rank that trains LoRA on a quantised base, under each of some strategies.

``python -m tests.strategies.quantised_rank OUTPUT MODEL CASES``, a JSON list of
[strategy, options, quantise, dora].
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import OptimizerSection
from anygauge.interface import Backend
from anygauge.kernels.loss import model_loss
from anygauge.models.quantised import Nf4Linear, QuantisedLinear
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import build_context, model_factory, open_rank
from tests.strategies.parity_rank import ParityCase, placed

STEPS, ROWS, LR = 5, 4, 5e-3
CASE = ParityCase(strategy="")


def rows() -> torch.Tensor:
    """(ROWS, 16) tokens of each step."""
    return torch.randint(1, 255, (ROWS, 16), generator=torch.Generator().manual_seed(0))


def live_bytes() -> int:
    """Of all tensors in this process's memory, each storage counted once."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@contextlib.contextmanager
def peak_of_encoding() -> Iterator[list[int]]:
    """What is in memory after each tensor was quantised, the tensor and its codes included."""
    peaks = [0]

    def counted(self: Any, weight: torch.Tensor) -> torch.Tensor:
        codes = plain(self, weight)
        peaks.append(live_bytes())
        return codes

    plain = Nf4Linear.encode
    with mock.patch.object(Nf4Linear, "encode", counted):
        yield peaks


def trained(model: str, case: Any, backend: Backend, rank: int, world: int) -> dict[str, Any]:
    name, options, quantise, dora = case
    registry = Registry.load()
    provided = registry.find_strategy(name)
    kind = load_options(provided, "strategy")
    chosen = kind(**options)
    share = provided.spec.share(chosen, rank, world)
    before = live_bytes()
    with peak_of_encoding() as peaks:
        engine = registry.strategy(name)(chosen).build(
            build_context(
                factory=model_factory(
                    ModelSection(name=model, quantise=quantise),
                    AdapterSection(r=4, dora=dora),
                    attention="sdpa",
                ),
                optimizer=optimizer_factory(OptimizerSection(name="adamw", lr=LR)),
                backend=backend,
                rank=rank,
                world_size=world,
                micro_batch=1,
                share=share,
                accumulation=ROWS // share.count,
            )
        )
    held = live_bytes() - before
    losses = []
    for _ in range(STEPS):
        batches = [
            placed(CASE, ids, ids, share, backend.placement.device)
            for ids in rows().split(1)[share.index :: share.count]
        ]
        sums = engine.run_step(batches, model_loss, ROWS * 15).loss_sums
        engine.update(LR, 1.0)
        mine = [float(sum(map(float, sums)))]
        losses.append((backend.collectives.sum_on_host(mine) if world > 1 else mine)[0])
    codes = sum(
        getattr(p := m.weight, "ds_tensor", p.to_local() if hasattr(p, "to_local") else p).numel()
        for m in engine.model.modules()
        if isinstance(m, QuantisedLinear) and not m.weight.is_meta
    )
    engine.close()
    return {"losses": losses, "codes": codes, "peak": max(peaks) - before, "held": held}


def main(output: Path, model: str, cases: list[Any]) -> None:
    backend = Registry.load().create_backend("cpu")
    rank, world = open_rank(backend, alone=False)
    found = [trained(model, case, backend, rank, world) for case in cases]
    output.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
