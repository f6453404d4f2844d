"""The kit's checks on many mutants in seconds: one process imports torch, each rank is its fork.

A process of its own, because one with threads (a test runner's) must not fork.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from anygauge.testing.check import CHECKS
from anygauge.testing.process import PartVerdicts, import_checks, merge, run_to_end
from anygauge.testing.process import main as ask_all_of
from tests.testing.wrong import limit_checks, mutant_named

RANKS = {"basic": 1, "device": 1, "operators": 1, "ranks": 2}
ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
"""Seconds that all processes of one mutant may take."""


def ranks_of(part: str, mutation: str) -> int:
    """How many ranks a mutation is tried on."""
    found = mutant_named(mutation) if part == "ranks" else None
    return RANKS[part] if found is None else found.ranks


def mutant_site(folder: Path) -> Path:
    """A folder with an installed distribution that has the backend `mutant`."""
    site = folder / "site"
    info = site / "anygauge_mutant-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anygauge-mutant\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anygauge]\nmutant = anygauge_mutant\n")
    shutil.copy(Path(__file__).with_name("mutants.py"), site / "anygauge_mutant.py")
    return site


Asked = Callable[[str], Mapping[str, str | None]]


def answers_by_part(folder: Path, asked: Asked) -> Callable[[str, str], PartVerdicts]:
    """Gives the answers of a part's checks on a mutation; of each part, all are made at once.

    Args:
        asked: by part, the mutations with the only check that is asked; None for all.
    """
    site = mutant_site(folder)
    found = functools.cache(lambda part: answers_of(part, asked(part), folder, site))
    return lambda part, mutation: found(part)[mutation]


def answers_of(
    part: str, mutations: Mapping[str, str | None], folder: Path, site: Path
) -> dict[str, PartVerdicts]:
    """Answers of a part's checks, by mutation."""
    # A process that a fork starts finds this file's package, too.
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    asked = {"part": part, "mutations": mutations, "folder": str(folder)}
    subprocess.run(
        [sys.executable, "-m", "tests.testing.mutation_forks"],
        cwd=ROOT,
        input=json.dumps(asked),
        text=True,
        check=True,
        timeout=300 + 60 * len(mutations),
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "ANYGAUGE_SIM_LOCKS": str(folder / "locks"),  # cards that no other process holds
        },
    )
    return {
        mutation: _answers(folder / f"{part}{number}.found")
        for number, mutation in enumerate(mutations)
    }


def _answers(path: Path) -> PartVerdicts:
    return PartVerdicts(**json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    # Those of the part alone: that of `basic` must not import torch.
    asked = json.load(sys.stdin)
    part = asked["part"]
    import_checks(part)
    if part == "operators":
        from anygauge.testing.operators import op_infos

        op_infos()  # once, and not in each fork
    for number, (mutation, check) in enumerate(asked["mutations"].items()):
        world = ranks_of(part, mutation)
        base = Path(asked["folder"]) / f"{part}{number}"
        children = [MutantFork(part, mutation, check, base, rank, world) for rank in range(world)]
        files = [Path(f"{base}.{rank}.json") for rank in range(world)]
        found = merge(files, run_to_end(children, files, LIMIT_S))
        record = {"verdicts": found.verdicts, "trouble": found.trouble}
        Path(f"{base}.found").write_text(json.dumps(record), encoding="utf-8")


class MutantFork:
    """One rank of a mutant, as `run_to_end` waits for it."""

    def __init__(
        self, part: str, mutation: str, check: str | None, base: Path, rank: int, world: int
    ) -> None:
        self._status: int | None = None
        self._child = os.fork()
        if not self._child:
            answer_forked(part, mutation, check, base, rank, world)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self._child, 0)


def answer_forked(
    part: str, mutation: str, check: str | None, base: Path, rank: int, world: int
) -> NoReturn:
    """What a fork does: answer, and end."""
    status = 1
    atexit._clear()  # what is registered from now on is the fork's own
    try:
        identity = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in identity.items()})
        os.environ["ANYGAUGE_MUTATION"] = mutation
        request: dict[str, Any] = {
            "part": part,
            "backend": "mutant",
            "options": {},
            "rendezvous": f"file://{base}.rendezvous",
            "answers": f"{base}.{rank}.json",
        }
        wrong = mutant_named(mutation)
        if wrong is not None and wrong.limit_s is not None:
            limit_checks(wrong.limit_s)
        # How a process ends on paper depends on all that it was asked.
        if check is not None and not (part == "basic" and CHECKS[check].of_the_end):
            for other in CHECKS.keys() - {check}:
                del CHECKS[other]
        ask_all_of(request)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
