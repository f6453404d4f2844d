"""Runs a script as several ranks and waits for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.zygote import Fork, run_forks


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    world: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> None:
    """Run ``python -m module arguments`` as `world` ranks that meet in `folder`.

    The ranks are forks of a process that has imported torch, transformers, peft and DeepSpeed.
    """
    rendezvous = folder / f"rendezvous-{module.rsplit('.', 1)[-1]}-{os.urandom(4).hex()}"
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    forks = [
        Fork(
            module=module,
            arguments=arguments,
            log=str(log),
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "RENDEZVOUS": f"file://{rendezvous}",
                **(environment or {}),
            },
        )
        for rank, log in enumerate(logs)
    ]
    codes = run_forks(forks, timeout_s=timeout_s)
    said = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
    assert codes == [0] * world, f"exit statuses {codes}\n{said}"
