"""The kit's checks on many mutants in seconds: one process imports torch, each rank is its fork.

A process of its own, because one with threads (a test runner's) must not fork.
"""

from __future__ import annotations

import atexit
import functools
import io
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
from typing import Any

from anygauge.testing.check import CHECKS, Answer
from anygauge.testing.process import PartAnswers, import_checks, merged_answers
from anygauge.testing.watch import ENDING, ProcessWatch, wait
from tests.testing.wrong import mutant_named

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


def answers_by_part(folder: Path, asked: Asked) -> Callable[[str, str], PartAnswers]:
    """Gives the answers of a part's checks on a mutation; of each part, all are made at once.

    Args:
        asked: by part, the mutations with the only check that is asked; None for all.
    """
    site = mutant_site(folder)
    found = functools.cache(lambda part: answers_of(part, asked(part), folder, site))
    return lambda part, mutation: found(part)[mutation]


def answers_of(
    part: str, mutations: Mapping[str, str | None], folder: Path, site: Path
) -> dict[str, PartAnswers]:
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


def _answers(path: Path) -> PartAnswers:
    record = json.loads(path.read_text(encoding="utf-8"))
    answers = {name: Answer.load(each) for name, each in record["answers"].items()}
    return PartAnswers(answers=answers, trouble=record["trouble"])


def main() -> None:
    # Those of the part alone: that of `basic` must not import torch.
    asked = json.load(sys.stdin)
    part = asked["part"]
    import_checks(part)
    if part == "operators":
        from anygauge.testing.operators import infos

        infos()  # once, and not in each fork
    for number, (mutation, check) in enumerate(asked["mutations"].items()):
        world = ranks_of(part, mutation)
        base = Path(asked["folder"]) / f"{part}{number}"
        children = [fork(part, mutation, check, base, rank, world) for rank in range(world)]
        files = [Path(f"{base}.{rank}.json") for rank in range(world)]
        watch = ProcessWatch(files, children, limits(part, mutation))
        ended, late = wait(
            {rank: functools.partial(ended_with, child) for rank, child in enumerate(children)},
            watch,
            LIMIT_S,
        )
        troubles = [late] if late else []
        for rank, child in enumerate(children):
            if rank not in ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            elif ended[rank]:
                troubles.append(f"rank {rank} ended with status {ended[rank]}")
        trouble = "; ".join(troubles)
        answers = {**merged_answers(files), **watch.broken(trouble)}
        record = {
            "answers": {name: answer.record() for name, answer in answers.items()},
            "trouble": trouble,
        }
        Path(f"{base}.found").write_text(json.dumps(record), encoding="utf-8")


def limits(part: str, mutation: str) -> dict[str, float]:
    """Seconds that each check may take: few where it is to hang."""
    found = {check.name: check.limit_s for check in CHECKS.values()}
    wrong = mutant_named(mutation)
    if wrong is not None and wrong.limit_s is not None:
        found[wrong.check] = found[ENDING] = wrong.limit_s
    return found


def ended_with(child: int) -> int | None:
    """A child's exit status; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def fork(part: str, mutation: str, check: str | None, base: Path, rank: int, world: int) -> int:
    """Start one rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    atexit._clear()  # what is registered from now on is the fork's own
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
        # How a process ends on paper depends on all that it was asked.
        if check is not None and not (part == "basic" and CHECKS[check].of_the_end):
            for other in CHECKS.keys() - {check}:
                del CHECKS[other]
        from anygauge.testing.process import main as answer

        answer(part)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
