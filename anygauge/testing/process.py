"""Where checks run: processes of their own, with the environment that the backend sets.

The backend's code must not run, set variables or crash in the author's pytest. So one process makes
the environment of every rank, as an agent does, and one a rank asks the checks of a part, whose
verdicts it writes to its file of answers. Ranks meet in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from anygauge.agent.environment import NodeEnvironment
from anygauge.interface import AnygaugeError, Backend, LaunchSettings
from anygauge.registry import BLOCK_VARIABLE, Registry
from anygauge.testing.check import (
    CHECKS,
    COLLECTIVE_TIMEOUT_S,
    FAILED,
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
    answer_of,
    answers_in,
    run_to_end,
    start,
)

ON_DEVICE = "device memory copies chance real_sizes leaks"
PARTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "basic": ("on paper", ("paper", "rules", "leaks")),  # which import no torch
    "device": ("on a device", ON_DEVICE.split()),
    "operators": ("on torch's operators", ("operators",)),
    "ranks": ("on {ranks} ranks", ("collectives", "ranks", "memory", "leaks")),
}
"""What one kind of process is asked: where, in words, and the modules whose checks it asks, those
that say most of a device first."""
LIMIT_S = 600.0
"""Seconds that the processes of all ranks may take."""


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
    request = (part, subject.name, dict(subject.options), ranks)
    try:
        found, trouble = answer_of(made_environments, request, base, "the environment")
    except AssertionError as error:
        found, trouble = [base] * ranks, str(error)
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        {**each, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank, each in enumerate(found)
    ], trouble


def run_ranks(
    function: Callable[[Any], Any],
    request: Mapping[str, Any],
    subject: Subject,
    base: Path,
    *,
    ranks: int,
    part: str = "ranks",
    what: str = "",
) -> tuple[Sequence[Path], str]:
    """Call a function on each rank, with the backend's environment, until all have ended.

    Args:
        request: it gets this, with ``rendezvous`` and, by rank, ``answers``, a file.
        base: the files' path without the rank.
        part: one of `PARTS`, in whose environment it runs.
        what: as `run_to_end` takes it.

    Returns:
        The files, which a process may not have written; and how one ended that did not end in
        order, or why it lacked its environment, in words.
    """
    found, trouble = environments(part, subject, ranks)
    files = [base.with_name(f"{base.name}.rank{rank}.json") for rank in range(ranks)]
    request = {**request, "rendezvous": f"file://{base}.rendezvous"}
    processes = [
        start(function, [{**request, "answers": str(file)}], environment, file)
        for file, environment in zip(files, found, strict=True)
    ]
    ended = run_to_end(processes, files, LIMIT_S, what=what)
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
            return judged(check.function, self.trouble, None)
        why = f": {self.trouble}" if self.trouble else ""
        return self.verdicts.get(check.name, (FAILED, f"the check was not reached{why}"))


def ask(part: str, subject: Subject, folder: Path, *, ranks: int = 1) -> PartVerdicts:
    """Run every check of a part; returns once all processes have ended.

    Args:
        part: one of `PARTS`.
        folder: for answers, logs and the meeting point.
    """
    request = {
        "part": part,
        "backend": subject.name,
        "options": dict(subject.options),
        "limits": {each.name: each.limit_s for each in CHECKS.values()},
    }
    what = f"{subject.name} {PARTS[part][0].format(ranks=ranks)}"
    base = folder / f"{part}{ranks}"
    return merged(*run_ranks(main, request, subject, base, part=part, ranks=ranks, what=what))


def merged(files: Sequence[Path], trouble: str = "") -> PartVerdicts:
    """The worst verdict of all ranks on each check, from a file of each.

    A rank without one that others gave has failed, and so has a check that some rank has begun and
    not ended, because of `trouble`.
    """
    by_rank = [answers_in(file) for file in files]
    verdicts: dict[str, Verdict] = {}
    for name in dict.fromkeys(name for each in by_rank for name in each if name not in STEPS_S):
        given = [each.get(name, (FAILED, "gave no answer")) for each in by_rank]
        if len(files) > 1:
            given = [
                (result, f"rank {rank}: {why}" if result == FAILED else why)
                for rank, (result, why) in enumerate(given)
            ]
        broken = any(result == BEGUN for result, _ in given)
        verdicts[name] = (FAILED, trouble) if broken else worst(given)
    return PartVerdicts(verdicts=verdicts, trouble=trouble)


# -- in the process -------------------------------------------------------------------------------


def made_environments(
    part: str, name: str, options: Mapping[str, Any], ranks: int
) -> tuple[Sequence[Mapping[str, str]], str]:
    """Every rank's environment, and why the backend's share is missing; opens no device."""
    base = dict(os.environ)
    try:
        if part == "basic":
            # It asks what announcing the backend imports; other plugins may import what they like.
            registry = Registry.load(base)
            own = (registry.find_backend(name).distribution, "anygauge")
            every = (*registry.plugins, *registry.failures)
            others = [each.entry_point for each in every if each.distribution not in own]
            base[BLOCK_VARIABLE] = ",".join(filter(None, [base.get(BLOCK_VARIABLE), *others]))
        launch = LaunchSettings(devices=ranks)
        job = replace(JOB, backend=name, backend_options=options, launch=launch)
        node = NodeEnvironment(job, 0, base)
        return [node.of_rank(rank) for rank in range(ranks)], ""
    except AnygaugeError as error:
        return [base] * ranks, f"there is no environment for it: {error}"


def import_checks(part: str) -> None:
    """Register the checks of a part."""
    for name in PARTS[part][1]:
        importlib.import_module(f"anygauge.testing.{name}")


def main(request: Any) -> None:
    """Ask every check of a part; verdicts are written one by one, so that a crash keeps them."""
    part, path = request["part"], Path(request["answers"])
    import_checks(part)
    answers = Answers(path, request["limits"])
    state = ProcessState(path, opens=part != "basic")
    (_on_paper if part == "basic" else _on_device)(request, answers, state)
    answers.begin(ENDING)


def _ask_all(
    part: str,
    answers: Answers,
    state: ProcessState,
    judge: Callable[[ConformanceCheck], Verdict] | None = None,
) -> None:
    """Ask the checks of a part; without `judge` those of what closing leaves behind."""
    for check in CHECKS.values():
        if (check.part, check.of_the_end, check.of_the_close) == (part, False, judge is None):
            answers.begin(check.name)
            verdict = judge(check) if judge else judged(check.function, state, None)
            if judge:  # on a device a check may change what it likes
                state.note(f"asking whether {check.title}", judged=part == "basic")
            answers.write(check.name, *verdict)


def _on_paper(request: Any, answers: Answers, state: ProcessState) -> None:
    registry = Registry.load(os.environ)
    state.note("importing it")
    paper = Paper(name=request["backend"], options=request["options"], registry=registry)
    _ask_all("basic", answers, state, lambda each: judged(each.function, paper, None))
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
    _ask_all("basic", answers, state)


def _on_device(request: Any, answers: Answers, state: ProcessState) -> None:
    """Open the backend, ask, close it, and ask what that leaves behind, also if it raises."""
    answers.begin(OPENING)
    part, registry = request["part"], Registry.load(os.environ)
    fresh = partial(registry.create_backend, request["backend"], request["options"])
    if part == "operators":
        from anygauge.testing.operators import infos

        infos()  # their import takes longer than a check
    backend = fresh()
    collectives = backend.support("collectives")
    absent, subject = None, None
    if part == "ranks" and not collectives:  # then they must not even open
        absent = judged(lambda _: _opened(request, backend, fresh), None, collectives)
    else:
        subject = _opened(request, backend, fresh)

    def judge(check: ConformanceCheck) -> Verdict:
        if absent is not None:
            return absent
        declared = None if check.capability is None else backend.support(check.capability)
        function = (lambda on: on.ask(check)) if part == "ranks" else check.function
        return judged(function, subject, declared)

    state.note("importing and opening it")
    _ask_all(part, answers, state, judge)
    answers.begin(CLOSING)
    try:
        backend.close()
    finally:
        state.note("closing")
        _ask_all(part, answers, state)


def _opened(request: Any, backend: Backend, fresh: Callable[[], Backend]) -> Any:
    """What the part's checks get, with the backend opened for it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = backend.open(rank)
    if request["part"] != "ranks":
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
