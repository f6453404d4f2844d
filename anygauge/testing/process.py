"""Where checks run: processes of their own, with the environment that the backend sets.

The backend's code must not run, set variables or crash in the author's pytest. So
``python -m anygauge.testing.process PART`` reads a request from standard input as JSON: for
``environments`` it answers with the environment of every rank, as an agent makes it; for one of
`PARTS` it writes the verdicts of that part's checks to the file that the request names. Ranks meet
in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anygauge.agent.environment import NodeEnvironment
from anygauge.interface import AnygaugeError, Backend, LaunchSettings, Support
from anygauge.registry import BLOCK_VARIABLE, Registry
from anygauge.testing.check import (
    CHECKS,
    COLLECTIVE_TIMEOUT_S,
    FAILED,
    PASSED,
    ConformanceCheck,
    Opened,
    Verdict,
    judged,
    worst,
)
from anygauge.testing.leaks import ProcessState
from anygauge.testing.paper import Paper
from anygauge.testing.rules import JOB, NODE, jobs
from anygauge.testing.watch import (
    BEGUN,
    CLOSING,
    ENDING,
    OPENING,
    STEPS_S,
    Answers,
    answer,
    answer_of,
    lines,
    run_to_end,
    start,
)

MODULE = "anygauge.testing.process"
ENVIRONMENTS = "environments"
ON_DEVICE = "device memory copies chance blocks graphs real_sizes leaks"
PARTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "basic": ("on paper", ("paper", "rules", "leaks")),  # which import no torch
    "device": ("on a device", ON_DEVICE.split()),
    "operators": ("on torch's operators", ("operators",)),
    "ranks": ("on {ranks} ranks", ("collectives", "ranks", "memory", "leaks")),
}
"""What one kind of process is asked: where, in words, and the modules whose checks it asks, those
that say most of a device first."""
LIMIT_S = 600.0
"""Seconds that the processes of a part may take in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The backend under test.

    Attributes:
        name: as users write it after ``--backend``.
        options: the run file's ``backend_options``.
        environment: variables for every process.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def create(self) -> Backend:
        """The backend, not opened, in this process."""
        return Registry.load().create_backend(self.name, self.options)


def environments(
    part: str, subject: Subject, ranks: int
) -> tuple[Sequence[Mapping[str, str]], str]:
    """The whole environment of every rank, and why the backend's share is missing; empty if not."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", **subject.environment}
    request = {"part": part, "subject": asdict(subject), "ranks": ranks}
    try:
        found, trouble = answer_of(("-m", MODULE, ENVIRONMENTS), request, base, "the environment")
    except AssertionError as error:
        found, trouble = [base] * ranks, str(error)
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        {**each, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank, each in enumerate(found)
    ], trouble


def run_ranks(
    module: Sequence[str],
    request: Mapping[str, Any],
    subject: Subject,
    base: Path,
    *,
    ranks: int,
    part: str = "ranks",
    limit_s: float = LIMIT_S,
    what: str = "",
) -> tuple[Sequence[Path], str]:
    """Run a module of the kit on each rank, with the backend's environment, until all have ended.

    Args:
        module: after ``-m``, with its arguments.
        request: on its standard input, with ``rendezvous`` and, by rank, ``answers``, a file.
        base: the files' path without the rank.
        part: one of `PARTS`, in whose environment it runs.
        limit_s, what: as `run_to_end` takes them.

    Returns:
        The files, which a process may not have written; and how one ended that did not end in
        order, or why it lacked its environment, in words.
    """
    found, trouble = environments(part, subject, ranks)
    files = [base.with_name(f"{base.name}.rank{rank}.json") for rank in range(ranks)]
    request = {**request, "rendezvous": f"file://{base}.rendezvous"}
    processes = [
        start(module, {**request, "answers": str(file)}, environment, file.with_suffix(".log"))
        for file, environment in zip(files, found, strict=True)
    ]
    ended = run_to_end(processes, files, limit_s, what=what)
    return files, "; ".join(filter(None, [trouble, ended]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartVerdicts:
    """What a part's processes gave.

    Attributes:
        verdicts: by the check's name.
        trouble: how a process ended if not in order, or why it lacked its environment: why there
            are fewer; empty if there was none.
    """

    verdicts: Mapping[str, Verdict]
    trouble: str = ""

    def of(self, check: ConformanceCheck) -> Verdict:
        """The verdict on a check; one that says what happened where there is none."""
        if check.of_the_end:
            try:
                check.function(self.trouble)
            except AssertionError as error:
                return FAILED, str(error)
            return PASSED, ""
        why = f": {self.trouble}" if self.trouble else ""
        return self.verdicts.get(check.name, (FAILED, f"the check was not reached{why}"))


def ask(part: str, subject: Subject, folder: Path, *, ranks: int = 1) -> PartVerdicts:
    """Run every check of a part; returns once all processes have ended.

    Args:
        part: one of `PARTS`.
        folder: for answers, logs and the meeting point.
    """
    request = {
        "backend": subject.name,
        "options": dict(subject.options),
        "limits": {each.name: each.limit_s for each in CHECKS.values()},
    }
    what = f"{subject.name} {PARTS[part][0].format(ranks=ranks)}"
    base = folder / f"{part}{ranks}"
    return merged(
        *run_ranks([MODULE, part], request, subject, base, part=part, ranks=ranks, what=what)
    )


def merged(files: Sequence[Path], trouble: str = "") -> PartVerdicts:
    """The worst verdict of all ranks on each check, from a file of each.

    A rank without one that others gave has failed, and so has a check that some rank has begun and
    not ended, because of `trouble`.
    """
    by_rank: list[dict[str, Verdict]] = []
    broken = set()
    for rank, file in enumerate(files):
        records = lines(file)
        who = f"rank {rank}: " if len(files) > 1 else ""
        by_rank.append(
            {
                each["name"]: (each["result"], who * (each["result"] == FAILED) + each["why"])
                for each in records
                if BEGUN not in each
            }
        )
        broken |= {each[BEGUN] for each in records[-1:] if BEGUN in each} - STEPS_S.keys()
    verdicts = {
        name: worst(
            each.get(name, (FAILED, f"rank {rank}: gave no answer"))
            for rank, each in enumerate(by_rank)
        )
        for name in dict.fromkeys(name for each in by_rank for name in each)
    }
    return PartVerdicts(
        verdicts=verdicts | dict.fromkeys(broken, (FAILED, trouble)), trouble=trouble
    )


# -- in the process -------------------------------------------------------------------------------


def main(part: str) -> None:
    """Ask every check of a part; verdicts are written one by one, so that a crash keeps them."""
    request = json.load(sys.stdin)
    if part == ENVIRONMENTS:
        answer(_made_environments(request))
        return
    path = Path(request["answers"])
    answers = Answers(path, request["limits"])
    state = ProcessState(path, opens=part != "basic")
    if part == "basic":
        _on_paper(request, answers, state)
    else:
        _on_device(part, request, answers, state)
    answers.begin(ENDING)


def import_checks(part: str) -> None:
    """Register the checks of a part."""
    for name in PARTS[part][1] if part in PARTS else ():
        importlib.import_module(f"anygauge.testing.{name}")


Judge = Callable[[ConformanceCheck], Verdict]


def _ask_all(part: str, answers: Answers, judge: Judge, *, of_the_close: bool = False) -> None:
    for check in CHECKS.values():
        if (check.part, check.of_the_end, check.of_the_close) == (part, False, of_the_close):
            answers.begin(check.name)
            answers.write(check.name, *judge(check))


def _on_paper(request: Any, answers: Answers, state: ProcessState) -> None:
    registry = Registry.load(os.environ)
    state.note("importing it")
    paper = Paper(name=request["backend"], options=request["options"], registry=registry)

    def judge(check: ConformanceCheck) -> Verdict:
        found = judged(check.function, paper, None)
        state.note(f"asking whether {check.title}")
        return found

    _ask_all("basic", answers, judge)
    steps: dict[str, Callable[[], object]] = {
        "probing it": paper.spec.probe,
        "making one": paper.backend,
        "asking for its environment": lambda: [
            list(paper.backend().environment(job, NODE, 0)) for job in jobs(paper)
        ],
    }
    for step, take in steps.items():
        with contextlib.suppress(Exception):  # the other checks are about what it raises
            take()
        state.note(step)
    _ask_all("basic", answers, lambda each: judged(each.function, state, None), of_the_close=True)


def _on_device(part: str, request: Any, answers: Answers, state: ProcessState) -> None:
    """Open the backend, ask, close it, and ask what that leaves behind, also if it raises."""
    answers.begin(OPENING)
    registry = Registry.load(os.environ)

    def fresh() -> Backend:
        return registry.create_backend(request["backend"], request["options"])

    if part == "operators":
        from anygauge.testing.operators import infos

        infos()  # their import takes longer than a check
    backend = fresh()

    collectives = backend.support("collectives")
    absent = collectives if part == "ranks" and not collectives else None
    subject: Any = None
    try:
        subject = _opened(part, request, backend, fresh)
    except Exception:
        if absent is None:
            raise
        traceback.print_exc()

    def judge(check: ConformanceCheck) -> Verdict:
        if absent is not None:  # then they must not even open
            return judged(_holds, subject is not None, absent)
        return judged(check.function, subject, _declared(check, backend))

    state.note("importing and opening it")
    _ask_all(part, answers, judge)
    state.note("the checks", judged=False)
    answers.begin(CLOSING)
    try:
        backend.close()
    finally:
        state.note("closing")
        _ask_all(part, answers, lambda each: judged(each.function, state, None), of_the_close=True)


def _declared(check: ConformanceCheck, backend: Backend) -> Support | None:
    return None if check.capability is None else backend.support(check.capability)


def _holds(value: bool) -> None:
    assert value


def _opened(part: str, request: Any, backend: Backend, fresh: Callable[[], Backend]) -> Any:
    """What the part's checks get, with the backend opened for it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = backend.open(rank)
    if part != "ranks":
        visible = backend.placement.device_count()
        return Opened(backend=backend, device=device, visible=visible, fresh=fresh)
    from anygauge.testing.rank_context import RankContext  # which imports torch

    backend.collectives.open(
        rendezvous=request["rendezvous"],
        rank=rank,
        world_size=world_size,
        timeout_s=COLLECTIVE_TIMEOUT_S,
        device=device,
    )
    return RankContext(backend=backend, device=device, rank=rank, world_size=world_size)


def _made_environments(request: Any) -> tuple[Sequence[Mapping[str, str]], str]:
    """Every rank's environment, and why the backend's share is missing; opens no device."""
    subject, ranks = Subject(**request["subject"]), request["ranks"]
    base = dict(os.environ)
    try:
        if request["part"] == "basic":
            # It asks what announcing the backend imports; other plugins may import what they like.
            registry = Registry.load(base)
            own = (registry.find_backend(subject.name).distribution, "anygauge")
            every = (*registry.plugins, *registry.failures)
            others = [each.entry_point for each in every if each.distribution not in own]
            base[BLOCK_VARIABLE] = ",".join(filter(None, [base.get(BLOCK_VARIABLE), *others]))
        launch = LaunchSettings(devices=ranks)
        job = replace(JOB, backend=subject.name, backend_options=subject.options, launch=launch)
        node = NodeEnvironment(job, 0, base)
        return [node.of_rank(rank) for rank in range(ranks)], ""
    except AnygaugeError as error:
        return [base] * ranks, f"there is no environment for it: {error}"


if __name__ == "__main__":
    # Under its own name: the checks that are imported now are those that it asks.
    from anygauge.testing import process

    process.import_checks(sys.argv[1])
    process.main(sys.argv[1])
