"""One of two ranks under ZeRO-3 with the optimizer in the host's memory, then on a disk.

``python -m tests.strategies.nvme_rank OUTPUT FOLDER``: rank 0 writes what each came to.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from anygauge.interface import Backend, Share
from anygauge.interface.strategy import Counters, Engine
from anygauge.kernels.loss import model_loss
from anygauge.registry import Registry
from tests.strategies.parity_rank import CONFIG, ParityCase, built, micro_batches, num_loss_tokens

WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Each rank has megabytes of masters: of less than one, DeepSpeed leaves all in memory."""


class Kept:
    """A state as it was exported."""

    def __init__(self, tensors: dict[tuple[str, str], Tensor], counters: Counters) -> None:
        self.tensors, self.counters = tensors, counters

    def names(self) -> Sequence[str]:
        return list(dict.fromkeys(name for name, _ in self.tensors))

    def tensor(self, name: str, key: str) -> Tensor:
        return self.tensors[name, key]


def steps(
    case: ParityCase, engine: Engine, share: Share, first: int, backend: Backend
) -> list[float]:
    """Losses of this rank and norms of two steps."""
    found = []
    for step in (first, first + 1):
        batches = list(micro_batches(case, step, share, backend.placement.device))
        result = engine.run_step(batches, model_loss, num_loss_tokens(case, step))
        norm = engine.update(1e-2, 1.0).grad_norm
        found += [*map(float, result.loss_sums), float(norm)]
    return found


def run(case: ParityCase, folder: Path, rank: int, backend: Backend) -> dict[str, Any]:
    """Train, export, import into a new engine, and train on."""
    engine, _, share = built(case, backend, rank, 2)
    found: dict[str, Any] = {"first": steps(case, engine, share, 0, backend)}
    dist.barrier()
    found["files"] = sorted(file.stat().st_size for file in folder.rglob("*.swp"))
    exported = {(name, key): tensor for name, key, tensor in engine.export_state()}
    whole = [exported]
    dist.broadcast_object_list(whole, src=0)
    counters = engine.counters()
    found["on"] = steps(case, engine, share, 2, backend)
    trained = engine.export_trained()
    engine.close()
    engine, _, _ = built(case, backend, rank, 2)
    engine.import_state(Kept(whole[0], counters))
    again = {(name, key): tensor for name, key, tensor in engine.export_state()}
    found["resumed"] = steps(case, engine, share, 2, backend)
    engine.close()
    dist.barrier()
    found["left"] = [str(file) for file in folder.iterdir()]
    found["updates"] = counters.updates
    if rank == 0:
        assert again.keys() == exported.keys()
        found["same"] = all(bool((again[key] == exported[key]).all()) for key in exported)
        found["state"] = {" ".join(key): float(t.double().norm()) for key, t in exported.items()}
        found["trained"] = {name: float(t.double().norm()) for name, t in trained.items()}
    return found


def main(output: Path, folder: Path) -> None:
    """Both."""
    CONFIG.update(WIDE)
    rank = int(os.environ["RANK"])
    backend = Registry.load().create_backend("cpu")
    device = backend.open(rank)
    backend.collectives.open(
        rendezvous=os.environ["RENDEZVOUS"], rank=rank, world_size=2, timeout_s=600, device=device
    )
    found = {}
    for name, where in {"host": {}, "disk": {"nvme": str(folder)}}.items():
        options = {"stage": 3, "offload": "optimizer", **where}
        found[name] = run(
            ParityCase(strategy="zero", options=options, lora=False), folder, rank, backend
        )
    if rank == 0:
        output.write_text(json.dumps(found))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
