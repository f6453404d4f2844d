"""The kit's checks on many mutants in seconds: one process imports torch, each rank is its fork.

A process of its own, because one with threads (a test runner's) must not fork.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.testing.check import CHECKS
from anygauge.testing.process import PartAnswers, merged_answers

RANKS = {"device": 1, "ranks": 2}


def answers_of(
    part: str, mutations: Mapping[str, str | None], folder: Path
) -> dict[str, PartAnswers]:
    """Answers of a part's checks, by mutation; the mutant must be on ``PYTHONPATH``.

    Args:
        mutations: with the only check that is asked; None for all.
    """
    asked = {"part": part, "mutations": mutations, "folder": str(folder)}
    subprocess.run(
        [sys.executable, "-m", "tests.testing.mutation_forks"],
        cwd=Path(__file__).parents[2],
        input=json.dumps(asked),
        text=True,
        check=True,
        timeout=120 + 20 * len(mutations),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = {}
    for number, mutation in enumerate(mutations):
        files = [folder / f"{part}{number}.{rank}.json" for rank in range(RANKS[part])]
        trouble = (folder / f"{part}{number}.trouble").read_text(encoding="utf-8")
        found[mutation] = PartAnswers(answers=merged_answers(files), trouble=trouble)
    return found


def main() -> None:
    from anygauge.testing import device, ranks  # noqa: F401  (imports torch)

    asked = json.load(sys.stdin)
    part = asked["part"]
    for number, (mutation, check) in enumerate(asked["mutations"].items()):
        world = RANKS[part]
        base = Path(asked["folder"]) / f"{part}{number}"
        children = [fork(part, mutation, check, base, rank, world) for rank in range(world)]
        troubles = []
        for rank, child in enumerate(children):
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                troubles.append(f"rank {rank} ended with status {status}")
        Path(f"{base}.trouble").write_text("; ".join(troubles), encoding="utf-8")


def fork(part: str, mutation: str, check: str | None, base: Path, rank: int, world: int) -> int:
    """Start one rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        identity = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in identity.items()})
        os.environ["ANYGAUGE_MUTATION"] = mutation
        request: dict[str, Any] = {
            "backend": "mutant",
            "options": {},
            "rendezvous": f"file://{base}.rendezvous",
            "answers": f"{base}.{rank}.json",
        }
        sys.stdin = io.StringIO(json.dumps(request))
        if check is not None:
            for other in CHECKS.keys() - {check}:
                del CHECKS[other]
        from anygauge.testing.process import main as answer

        answer(part)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
