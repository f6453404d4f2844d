"""Where checks run: processes of their own, with the environment that the backend sets.

The backend's code must not run, set variables or crash in the author's pytest. So
``python -m anygauge.testing.process PART`` reads a request from standard input as JSON: for
``environments`` it answers with the environment of every rank, as an agent makes it; for one of
`PARTS` it writes the answers of that part's checks to the file that the request names. Ranks meet
in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anygauge.agent.environment import NodeEnvironment
from anygauge.interface import AnygaugeError, Backend, LaunchSettings, Level
from anygauge.registry import BLOCK_VARIABLE, Registry
from anygauge.testing.check import (
    CHECKS,
    COLLECTIVE_TIMEOUT_S,
    Answer,
    ConformanceCheck,
    NotAsked,
    Opened,
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
    begun,
    lines,
    run_to_end,
    start,
)

MODULE = "anygauge.testing.process"
ENVIRONMENTS = "environments"
ENVIRONMENT_TIMEOUT_S = 60.0
NO_ANSWER = Answer(holds=False, detail="gave no answer")


@dataclass(frozen=True, slots=True)
class KitPart:
    """What one kind of process is asked.

    Attributes:
        where: in words; may name the number of ``ranks``.
        limit_s: seconds that its processes may take in all.
        modules: those whose checks it asks, the ones that say most of a device first.
    """

    where: str
    limit_s: float
    modules: Sequence[str]


ON_DEVICE = "device memory copies chance blocks graphs real_sizes leaks"
PARTS = {
    "basic": KitPart("on paper", 120.0, ("paper", "rules", "leaks")),  # which import no torch
    "device": KitPart("on a device", 600.0, ON_DEVICE.split()),
    "operators": KitPart("on torch's operators", 600.0, ("operators",)),
    "ranks": KitPart("on {ranks} ranks", 600.0, ("collectives", "ranks", "memory", "leaks")),
}


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
    arguments = ("-m", MODULE, ENVIRONMENTS)
    try:
        found, trouble = answer_of(
            arguments, request, base, "the environment", ENVIRONMENT_TIMEOUT_S
        )
    except AssertionError as error:
        found, trouble = [base] * ranks, str(error)
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        {**each, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank, each in enumerate(found)
    ], trouble


@dataclass(frozen=True, kw_only=True, slots=True)
class PartAnswers:
    """What a part's processes gave.

    Attributes:
        answers: by the check's name; of several ranks the first that does not hold.
        trouble: how a process ended if not in order, or why it lacked its environment: why there
            are not answers, or fewer; empty if there was none.
    """

    answers: Mapping[str, Answer]
    trouble: str = ""

    def of(self, check: ConformanceCheck) -> Answer:
        """The answer of a check; one that says what happened where there is none."""
        if check.of_the_end:
            try:
                check.function(self.trouble)
            except AssertionError as error:
                return Answer(holds=False, detail=str(error))
            return Answer(holds=True)
        if check.name in self.answers:
            return self.answers[check.name]
        why = f": {self.trouble}" if self.trouble else ""
        return Answer(holds=False, detail=f"the check was not reached{why}")


def ask(part: str, subject: Subject, folder: Path, *, ranks: int = 1) -> PartAnswers:
    """Run every check of a part; returns once all processes have ended.

    Args:
        part: one of `PARTS`.
        folder: for answers, logs and the meeting point.
    """
    found, trouble = environments(part, subject, ranks)
    files = [folder / f"{part}{ranks}.rank{rank}.json" for rank in range(ranks)]
    processes = [
        start(
            [MODULE, part],
            {
                "backend": subject.name,
                "options": dict(subject.options),
                "rendezvous": f"file://{folder / part}{ranks}.rendezvous",
                "answers": str(file),
                "limits": {each.name: each.limit_s for each in CHECKS.values()},
            },
            environment,
            file.with_suffix(".log"),
        )
        for file, environment in zip(files, found, strict=True)
    ]
    what = f"{subject.name} {PARTS[part].where.format(ranks=ranks)}"
    ended = run_to_end(processes, files, PARTS[part].limit_s, what=what)
    return merged_answers(files, "; ".join(filter(None, [trouble, ended])))


def merged_answers(files: Sequence[Path], trouble: str = "") -> PartAnswers:
    """Answers by the check's name, from a file of each rank: the first that does not hold.

    A rank without an answer that others gave counts as one that does not hold. A check that some
    rank has begun and not ended has failed, because of `trouble`.
    """
    records = [[record for record in lines(file) if BEGUN not in record] for file in files]
    found = [{each.pop("name"): Answer(**each) for each in record} for record in records]
    merged = {}
    for name in dict.fromkeys(name for answers in found for name in answers):
        answers = [(rank, each.get(name, NO_ANSWER)) for rank, each in enumerate(found)]
        failed = [(rank, answer) for rank, answer in answers if not answer.holds]
        # What is declared missing explains its own failure alone, not that of another rank.
        failed.sort(key=lambda each: not each[1].supported)
        rank, first = (failed or answers)[0]
        if failed and len(found) > 1:
            first = replace(first, detail=f"rank {rank}: {first.detail}")
        merged[name] = first
    broken = {begun(file).get(BEGUN, "") for file in files} - {"", *STEPS_S}
    merged |= dict.fromkeys(broken, Answer(holds=False, detail=trouble))
    return PartAnswers(answers=merged, trouble=trouble)


# -- in the process -------------------------------------------------------------------------------


def main(part: str) -> None:
    """Ask every check of a part; answers are written one by one, so that a crash keeps them."""
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
    for name in PARTS[part].modules if part in PARTS else ():
        importlib.import_module(f"anygauge.testing.{name}")


def _ask_all(
    part: str,
    answers: Answers,
    given: Callable[[ConformanceCheck], Answer],
    of_the_close: bool = False,
) -> None:
    for check in CHECKS.values():
        asked = check.part == part and not check.of_the_end
        if asked and check.of_the_close == of_the_close:
            answers.begin(check.name)
            answers.write(check.name, given(check))


def _asked(check: ConformanceCheck, subject: Any, backend: Backend | None) -> Answer:
    """The answer of a check; with a backend, beside what that declares."""
    found = Answer(holds=True)
    if check.capability is not None and backend is not None:
        support = backend.support(check.capability)
        off = support.level is Level.SWITCHED_OFF
        found = replace(found, declared=str(support), supported=bool(support), switched_off=off)
    try:
        check.function(subject)
    except NotAsked as reason:
        return Answer(holds=True, not_asked=str(reason))
    except Exception as error:
        traceback.print_exc()
        detail = str(error).strip() or type(error).__name__
        if not isinstance(error, AssertionError):
            detail = f"{type(error).__name__}: {detail}"
        return replace(found, holds=False, detail=detail.splitlines()[0])
    return found


def _on_paper(request: Any, answers: Answers, state: ProcessState) -> None:
    registry = Registry.load(os.environ)
    state.note("importing it")
    paper = Paper(name=request["backend"], options=request["options"], registry=registry)

    def given(check: ConformanceCheck) -> Answer:
        found = _asked(check, paper, None)
        state.note(f"asking whether {check.title}")
        return found

    _ask_all("basic", answers, given)
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
    _ask_all("basic", answers, lambda each: _asked(each, state, None), of_the_close=True)


def _on_device(part: str, request: Any, answers: Answers, state: ProcessState) -> None:
    """Open the backend, ask, close it, and ask what that leaves behind, also if it raises."""
    answers.begin(OPENING)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    registry = Registry.load(os.environ)

    def fresh() -> Backend:
        return registry.create_backend(request["backend"], request["options"])

    if part == "operators":
        from anygauge.testing.operators import infos

        infos()  # their import takes longer than a check
    backend = fresh()
    declared = part != "ranks" or bool(backend.support("collectives"))
    subject: Any = None
    refused: Exception | None = None
    try:
        device = backend.open(rank)
        if part == "ranks":
            from anygauge.testing.rank_context import RankContext  # which imports torch

            backend.collectives.open(
                rendezvous=request["rendezvous"],
                rank=rank,
                world_size=world_size,
                timeout_s=COLLECTIVE_TIMEOUT_S,
                device=device,
            )
            subject = RankContext(backend=backend, device=device, rank=rank, world_size=world_size)
        else:
            visible = backend.placement.device_count()
            subject = Opened(backend=backend, device=device, visible=visible, fresh=fresh)
    except Exception as error:
        if declared:
            raise
        traceback.print_exc()
        refused = error
    state.note("importing and opening it")
    if declared:
        _ask_all(part, answers, lambda each: _asked(each, subject, backend))
    else:
        _ask_all(part, answers, lambda each: _missing(each, backend, refused))
    state.note("the checks", judged=False)
    answers.begin(CLOSING)
    try:
        backend.close()
    finally:
        state.note("closing")
        _ask_all(part, answers, lambda each: _asked(each, state, backend), of_the_close=True)


def _missing(check: ConformanceCheck, backend: Backend, refused: Exception | None) -> Answer:
    """The answer where collectives are declared missing: they must not even open."""
    if refused is None:
        declared = backend.support("collectives")
        return Answer(holds=False, detail=f"declared as {declared}, but it works: they open")
    support = backend.support(check.capability or "collectives")
    detail = f"collectives do not open: {type(refused).__name__}: {refused}"
    return Answer(holds=False, detail=detail, declared=str(support), supported=bool(support))


def _made_environments(request: Any) -> tuple[Sequence[Mapping[str, str]], str]:
    """Every rank's environment, and why the backend's share is missing; opens no device."""
    subject, ranks = Subject(**request["subject"]), request["ranks"]
    base = dict(os.environ)
    try:
        if request["part"] == "basic":
            # It asks what announcing the backend imports; other plugins may import what they like.
            blocked = [base.get(BLOCK_VARIABLE, ""), *_others(Registry.load(base), subject.name)]
            base[BLOCK_VARIABLE] = ",".join(filter(None, blocked))
        job = replace(
            JOB,
            backend=subject.name,
            backend_options=subject.options,
            launch=LaunchSettings(devices=ranks),
        )
        node = NodeEnvironment(job, 0, base)
        return [node.of_rank(rank) for rank in range(ranks)], ""
    except AnygaugeError as error:
        return [base] * ranks, f"there is no environment for it: {error}"


def _others(registry: Registry, backend: str) -> Iterable[str]:
    """Names by which to block every plugin but the backend's own distribution and anygauge."""

    def plain(name: str) -> str:
        return name.lower().replace("_", "-").replace(".", "-")

    own = {registry.find_backend(backend).distribution, "anygauge"}
    every = (*registry.plugins, *registry.failures)
    found = {(each.distribution, each.entry_point) for each in every}
    kept = {plain(name) for names in found if names[0] in own for name in names}
    for names in found:
        if names[0] not in own:
            # By either name: one that ours bears, too, would block ours.
            yield from [name for name in names if name and plain(name) not in kept][:1]


if __name__ == "__main__":
    # Under its own name: the checks that are imported now are those that it asks.
    from anygauge.testing import process

    process.import_checks(sys.argv[1])
    process.main(sys.argv[1])
