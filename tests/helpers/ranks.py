"""Starts a script as several ranks and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    world: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> None:
    """Run ``python -m module arguments`` as `world` ranks that meet in `folder`."""
    rendezvous = folder / f"rendezvous-{module.rsplit('.', 1)[-1]}-{os.urandom(4).hex()}"
    processes = []
    for rank in range(world):
        log = (folder / f"rank{rank}.log").open("wb")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "RENDEZVOUS": f"file://{rendezvous}",
                    "OMP_NUM_THREADS": "1",
                    **(environment or {}),
                },
            )
        )
        log.close()
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(
        (folder / f"rank{rank}.log").read_text(errors="replace")[-3000:] for rank in range(world)
    )
    assert codes == [0] * world, f"exit statuses {codes}\n{logs}"
