"""Where checks run: processes of their own, so that a device that crashes ends none but itself.

``python -m anygauge.testing.process PART`` reads what to ask from standard input as JSON and writes
answers to the file that it names. Several ranks of it meet in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anygauge.interface import Backend
from anygauge.registry import Registry
from anygauge.testing.basic import Paper
from anygauge.testing.check import CHECKS, Answer, Check, NotAsked, Opened
from anygauge.testing.surroundings import Subject, environments, last_lines

TIMEOUTS_S = {"basic": 60.0, "device": 600.0, "ranks": 600.0}
COLLECTIVE_TIMEOUT_S = 60.0
NO_ANSWER = Answer(holds=False, detail="gave no answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a part's processes gave.

    Attributes:
        answers: by the check's name; of several ranks the first that does not hold.
        trouble: how a process ended if not in order, or why it lacked its environment: why there
            are not answers, or fewer; empty if there was none.
    """

    answers: Mapping[str, Answer]
    trouble: str = ""

    def of(self, check: Check) -> Answer:
        """The answer of a check; one that says what happened where there is none."""
        if check.of_the_end:
            try:
                check.function(self.trouble)
            except AssertionError as error:
                return Answer(holds=False, detail=str(error))
            return Answer(holds=True)
        if check.name in self.answers:
            return self.answers[check.name]
        return Answer(holds=False, detail=self.trouble or "the check was not reached")


def ask(part: str, subject: Subject, folder: Path, *, ranks: int = 1) -> Answers:
    """Run every check of a part; returns once all processes have ended.

    Args:
        part: ``basic``, ``device`` or ``ranks``.
        folder: for answers, logs and the meeting point.
    """
    rendezvous = folder / f"{part}{ranks}.rendezvous"
    found, trouble = environments(part, subject, ranks, folder)
    troubles = [trouble] if trouble else []
    processes = []
    for rank, environment in enumerate(found):
        log = (folder / f"{part}{ranks}.rank{rank}.log").open("wb")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "anygauge.testing.process", part],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        )
        log.close()
        request = {
            "backend": subject.name,
            "options": dict(subject.options),
            "rendezvous": f"file://{rendezvous}",
            "answers": str(folder / f"{part}{ranks}.rank{rank}.json"),
        }
        pipe = processes[-1].stdin
        assert pipe is not None
        pipe.write(json.dumps(request).encode())
        pipe.close()
    limit = TIMEOUTS_S[part]
    deadline = time.monotonic() + limit
    for rank, process in enumerate(processes):
        try:
            status = process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            troubles.append(f"rank {rank} had not ended after {limit:.0f} s")
            continue
        if status:
            said = last_lines(folder / f"{part}{ranks}.rank{rank}.log")
            troubles.append(f"rank {rank} ended with status {status}: {said}")
    files = [folder / f"{part}{ranks}.rank{rank}.json" for rank in range(ranks)]
    return Answers(answers=merged_answers(files), trouble="; ".join(troubles))


def _read(path: Path) -> dict[str, Answer]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {record.pop("name"): Answer.load(record) for record in records}


def merged_answers(files: Sequence[Path]) -> dict[str, Answer]:
    """Answers by the check's name, from a file of each rank: the first that does not hold.

    A rank without an answer that others gave counts as one that does not hold.
    """
    found = [_read(file) for file in files]
    names = dict.fromkeys(name for answers in found for name in answers)
    merged = {}
    for name in names:
        answers = [(rank, each.get(name, NO_ANSWER)) for rank, each in enumerate(found)]
        failed = [(rank, answer) for rank, answer in answers if not answer.holds]
        # What is declared missing explains its own failure alone, not that of another rank.
        failed.sort(key=lambda each: not each[1].supported)
        rank, answer = (failed or answers)[0]
        if failed and len(found) > 1:
            answer = replace(answer, detail=f"rank {rank}: {answer.detail}")
        merged[name] = answer
    return merged


# -- in the process -------------------------------------------------------------------------------


def main(part: str) -> None:
    """Ask every check of a part; answers are written one by one, so that a crash keeps them."""
    request = json.loads(sys.stdin.read())
    with Path(request["answers"]).open("w", encoding="utf-8") as file:

        def answer(check: Check, given: Answer) -> None:
            file.write(json.dumps({"name": check.name, **given.record()}) + "\n")
            file.flush()

        {"basic": _basic, "device": _device, "ranks": _ranks}[part](request, answer)


def _checks(part: str) -> list[Check]:
    return [check for check in CHECKS.values() if check.part == part and not check.of_the_end]


def _asked(check: Check, subject: Any, backend: Any) -> Answer:
    declared, supported = "", True
    if check.capability is not None:
        support = backend.support(check.capability)
        declared, supported = str(support), bool(support)
    try:
        check.function(subject)
    except NotAsked as reason:
        return Answer(holds=True, not_asked=str(reason))
    except Exception as error:
        traceback.print_exc()
        detail = str(error).strip() or type(error).__name__
        if not isinstance(error, AssertionError):
            detail = f"{type(error).__name__}: {detail}"
        return Answer(
            holds=False, detail=detail.splitlines()[0], declared=declared, supported=supported
        )
    return Answer(holds=True, declared=declared, supported=supported)


def _basic(request: Any, answer: Any) -> None:
    paper = Paper(
        name=request["backend"], options=request["options"], registry=Registry.load(os.environ)
    )
    for check in _checks("basic"):
        answer(check, _asked(check, paper, None))


def _device(request: Any, answer: Any) -> None:
    registry = Registry.load(os.environ)

    def fresh() -> Backend:
        return registry.create_backend(request["backend"], request["options"])

    backend = fresh()
    device = backend.open(0)
    subject = Opened(
        backend=backend, device=device, visible=backend.placement.device_count(), fresh=fresh
    )
    for check in _checks("device"):
        answer(check, _asked(check, subject, backend))
    backend.close()


def _ranks(request: Any, answer: Any) -> None:
    from anygauge.testing.ranks import Together  # which imports torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = Registry.load(os.environ).create_backend(request["backend"], request["options"])
    declared = backend.support("collectives")
    refused: Exception | None = None
    try:
        device = backend.open(rank)
        backend.collectives.open(
            rendezvous=request["rendezvous"],
            rank=rank,
            world_size=world_size,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            device=device,
        )
    except Exception as error:
        if declared:
            raise
        traceback.print_exc()
        refused = error
    if declared:
        subject = Together(backend=backend, device=device, rank=rank, world_size=world_size)
    for check in _checks("ranks"):
        given = _asked(check, subject, backend) if declared else _missing(check, backend, refused)
        answer(check, given)
    backend.close()


def _missing(check: Check, backend: Any, refused: Exception | None) -> Answer:
    """The answer where collectives are declared missing: they must not even open."""
    if refused is None:
        declared = backend.support("collectives")
        return Answer(holds=False, detail=f"declared as {declared}, but it works: they open")
    support = backend.support(check.capability or "collectives")
    detail = f"collectives do not open: {type(refused).__name__}: {refused}"
    return Answer(holds=False, detail=detail, declared=str(support), supported=bool(support))


if __name__ == "__main__":
    # Under its own name: the checks that are imported now are those that it asks.
    from anygauge.testing.process import main as run

    if sys.argv[1] == "device":
        from anygauge.testing import device as _device_checks  # noqa: F401
    run(sys.argv[1])
