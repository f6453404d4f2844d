"""Ranks that take the steps of a calibration's smallest models; ``python -m`` by a local job."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from anygauge.agent import local_job
from anygauge.config.resolved import run_json
from anygauge.interface import Job
from anygauge.planning.calibration import TINY, practice, practised
from anygauge.registry import Registry

MODULE = "tests.planning.practice_rank"


def run_rank(job: Job, rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """Runs, their work and their seconds."""
    registry = Registry.load()
    found = []
    with registry.create_backend(job.backend) as backend:
        device = backend.open(local_rank)
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout_s=60,
            device=device,
            secret=job.token,
        )
        for run in practice(registry, ["float32"], world_size):
            if (run.model.config or {})["hidden_size"] == TINY.width:
                work, seconds = practised(run, registry, backend, rank, world_size)
                found.append({"run": run_json(run), "work": asdict(work), "seconds": seconds})
    return {"found": found}


if __name__ == "__main__":
    sys.exit(local_job.main(MODULE, run_rank, sys.argv[1:]))
