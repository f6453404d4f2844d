"""Where checks run: processes of their own, with the environment that the backend sets.

The backend's code must not run, set variables or crash in the author's pytest. So
``python -m anygauge.testing.process PART`` reads a request from standard input as JSON and writes
to the file that it names: for ``environments`` the environment of every rank, as an agent makes it;
for ``basic``, ``device`` or ``ranks`` the answers of that part's checks. Ranks meet in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anygauge.agent.environment import inspect_node
from anygauge.interface import AnygaugeError, Backend, LaunchSettings, Level
from anygauge.registry import BLOCK_VARIABLE, Registry, applied, resolve_environment
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
    Answers,
    ProcessWatch,
    lines,
    wait,
)

ENVIRONMENTS = "environments"
ENVIRONMENT_TIMEOUT_S = 60.0
TIMEOUTS_S = {"basic": 120.0, "device": 600.0, "operators": 600.0, "ranks": 600.0}
NO_ANSWER = Answer(holds=False, detail="gave no answer")


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


def environments(
    part: str, subject: Subject, ranks: int, folder: Path
) -> tuple[Sequence[Mapping[str, str]], str]:
    """The whole environment of every rank, and why the backend's share is missing; empty if not.

    Args:
        folder: for the answer and a log.
    """
    base = {**os.environ, "OMP_NUM_THREADS": "1", **subject.environment}
    answer = folder / f"{part}{ranks}.environments.json"
    log = answer.with_suffix(".log")
    asked = {"part": part, "subject": asdict(subject), "ranks": ranks, "answer": str(answer)}
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "anygauge.testing.process", ENVIRONMENTS],
                input=json.dumps(asked).encode(),
                stdout=output,
                stderr=output,
                env=base,
                timeout=ENVIRONMENT_TIMEOUT_S,
                check=False,
            )
            status = f"with status {done.returncode}: {last_lines(log)}"
        except subprocess.TimeoutExpired:
            status = f"not within {ENVIRONMENT_TIMEOUT_S:.0f} s"
    if answer.exists():
        found = json.loads(answer.read_text(encoding="utf-8"))
        return found["environments"], found["trouble"]
    trouble = f"asking for the environment ended {status}"
    return [{**base, **_identity(rank, ranks)} for rank in range(ranks)], trouble


def last_lines(log: Path) -> str:
    """The end of a log, on one line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


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
        part: ``basic``, ``device``, ``operators`` or ``ranks``.
        folder: for answers, logs and the meeting point.
    """
    rendezvous = folder / f"{part}{ranks}.rendezvous"
    found, trouble = environments(part, subject, ranks, folder)
    troubles = [trouble] if trouble else []
    processes = []
    for rank, environment in enumerate(found):
        request = {
            "backend": subject.name,
            "options": dict(subject.options),
            "rendezvous": f"file://{rendezvous}",
            "answers": str(folder / f"{part}{ranks}.rank{rank}.json"),
        }
        log = folder / f"{part}{ranks}.rank{rank}.log"
        processes.append(start(["anygauge.testing.process", part], request, environment, log))
    files = [folder / f"{part}{ranks}.rank{rank}.json" for rank in range(ranks)]
    limits = {each.name: each.limit_s for each in CHECKS.values()}
    where = {"basic": "on paper", "device": "on a device"}.get(part, f"on {ranks} ranks")
    pids = [process.pid for process in processes]
    watch = ProcessWatch(files, pids, limits, f"{subject.name} {where}")
    running = {rank: process.poll for rank, process in enumerate(processes)}
    ended, late = wait(running, watch, TIMEOUTS_S[part])
    if late:
        troubles.append(late)
    for rank, process in enumerate(processes):
        if rank not in ended:
            process.kill()
            process.wait()
    for rank, status in ended.items():
        if status:
            said = last_lines(folder / f"{part}{ranks}.rank{rank}.log")
            troubles.append(f"rank {rank} ended with status {status}: {said}")
    trouble = "; ".join(troubles)
    return PartAnswers(answers={**merged_answers(files), **watch.broken(trouble)}, trouble=trouble)


def start(
    module: Sequence[str], request: Any, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Run a module of the kit with a request on its standard input."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(request).encode())
    return process


def _read(path: Path) -> dict[str, Answer]:
    records = [record for record in lines(path) if BEGUN not in record]
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
    if part == ENVIRONMENTS:
        _write_environments()
        return
    request = json.loads(sys.stdin.read())
    path = Path(request["answers"])
    answers = Answers(path)
    folder, output = path.with_suffix(".folder"), path.with_suffix(".out")
    state = ProcessState(folder, output, opens=part != "basic")
    kinds = {"basic": _basic, "device": _device, "operators": _operators, "ranks": _ranks}
    kinds[part](request, answers, state)
    answers.begin(ENDING)


def import_checks(part: str) -> None:
    """Register the checks of a part; those of `basic` import no torch."""
    modules = {
        "basic": ("paper", "rules", "leaks"),
        # Those first that say most of a device.
        "device": (
            *("device", "memory", "copies", "chance", "blocks", "graphs", "real_sizes"),
            *("arithmetic", "fp8", "leaks"),
        ),
        "operators": ("operators",),
        "ranks": ("collectives", "ranks", "memory", "leaks"),
    }
    for name in modules.get(part, ()):
        importlib.import_module(f"anygauge.testing.{name}")


def _ask_all(
    part: str,
    answers: Answers,
    given: Callable[[ConformanceCheck], Answer],
    *,
    of_the_close: bool = False,
) -> None:
    for check in CHECKS.values():
        asked = check.part == part and not check.of_the_end
        if asked and check.of_the_close == of_the_close:
            answers.begin(check.name)
            answers.write(check.name, given(check))


def _close(part: str, backend: Backend, answers: Answers, state: ProcessState) -> None:
    """Close the backend, and ask what that leaves behind, whether or not it raises."""
    state.note("the checks", judged=False)
    answers.begin(CLOSING)
    try:
        backend.close()
    finally:
        state.note("closing")
        _ask_all(part, answers, lambda each: _asked(each, state, backend), of_the_close=True)


def _asked(check: ConformanceCheck, subject: Any, backend: Any) -> Answer:
    declared, supported, switched_off = "", True, False
    if check.capability is not None:
        support = backend.support(check.capability)
        declared, supported = str(support), bool(support)
        switched_off = support.level is Level.SWITCHED_OFF
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
            holds=False,
            detail=detail.splitlines()[0],
            declared=declared,
            supported=supported,
            switched_off=switched_off,
        )
    return Answer(holds=True, declared=declared, supported=supported, switched_off=switched_off)


def _basic(request: Any, answers: Answers, state: ProcessState) -> None:
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


def _device(request: Any, answers: Answers, state: ProcessState) -> None:
    answers.begin(OPENING)
    registry = Registry.load(os.environ)

    def fresh() -> Backend:
        return registry.create_backend(request["backend"], request["options"])

    backend = fresh()
    device = backend.open(0)
    state.note("importing and opening it")
    subject = Opened(
        backend=backend, device=device, visible=backend.placement.device_count(), fresh=fresh
    )
    _ask_all("device", answers, lambda each: _asked(each, subject, backend))
    _close("device", backend, answers, state)


def _operators(request: Any, answers: Answers, state: ProcessState) -> None:
    from anygauge.testing.operators import infos  # which imports torch

    answers.begin(OPENING)
    infos()  # their import takes longer than a check
    backend = Registry.load(os.environ).create_backend(request["backend"], request["options"])
    subject = Opened(backend=backend, device=backend.open(0), visible=1, fresh=lambda: backend)
    _ask_all("operators", answers, lambda each: _asked(each, subject, backend))
    _close("operators", backend, answers, state)


def _ranks(request: Any, answers: Answers, state: ProcessState) -> None:
    from anygauge.testing.rank_context import RankContext  # which imports torch

    answers.begin(OPENING)
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
    state.note("importing and opening it")
    if declared:
        subject = RankContext(backend=backend, device=device, rank=rank, world_size=world_size)
        _ask_all("ranks", answers, lambda each: _asked(each, subject, backend))
    else:
        _ask_all("ranks", answers, lambda each: _missing(each, backend, refused))
    _close("ranks", backend, answers, state)


def _missing(check: ConformanceCheck, backend: Any, refused: Exception | None) -> Answer:
    """The answer where collectives are declared missing: they must not even open."""
    if refused is None:
        declared = backend.support("collectives")
        return Answer(holds=False, detail=f"declared as {declared}, but it works: they open")
    support = backend.support(check.capability or "collectives")
    detail = f"collectives do not open: {type(refused).__name__}: {refused}"
    return Answer(holds=False, detail=detail, declared=str(support), supported=bool(support))


def _write_environments() -> None:
    """Write every rank's environment to the file that the request names; opens no device."""
    asked = json.load(sys.stdin)
    subject, ranks = Subject(**asked["subject"]), asked["ranks"]
    base = dict(os.environ)
    found = [base] * ranks
    trouble = ""
    try:
        registry = Registry.load(base)
        if asked["part"] == "basic":
            # It asks what announcing the backend imports; other plugins may import what they like.
            blocked = [base.get(BLOCK_VARIABLE, ""), *_others(registry, subject.name)]
            base[BLOCK_VARIABLE] = ",".join(filter(None, blocked))
        backend = registry.create_backend(subject.name, subject.options)
        node = inspect_node(backend=backend, environ=base)
        job = replace(
            JOB,
            backend=subject.name,
            backend_options=subject.options,
            launch=LaunchSettings(devices=ranks),
        )
        found = [
            applied(resolve_environment(registry, backend, job, node, rank, base), base)
            for rank in range(ranks)
        ]
    except AnygaugeError as error:
        trouble = f"there is no environment for it: {error}"
    record = {
        "environments": [{**each, **_identity(n, ranks)} for n, each in enumerate(found)],
        "trouble": trouble,
    }
    Path(asked["answer"]).write_text(json.dumps(record), encoding="utf-8")


def _identity(rank: int, ranks: int) -> dict[str, str]:
    """Who a rank is, in an agent's words."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in numbers.items()}


def _others(registry: Registry, backend: str) -> list[str]:
    """Names by which to block every plugin but the backend's own distribution and anygauge."""

    def plain(name: str) -> str:
        return name.lower().replace("_", "-").replace(".", "-")

    own = {registry.find_backend(backend).distribution, "anygauge"}
    found = [(plugin.distribution, plugin.entry_point) for plugin in registry.plugins]
    found += [(failure.distribution, failure.entry_point) for failure in registry.failures]
    kept = {plain(name) for names in found if names[0] in own for name in names}
    blocks = [
        # By either name: one that ours bears, too, would block ours.
        next((name for name in names if name and plain(name) not in kept), "")
        for names in found
        if names[0] not in own
    ]
    return sorted(set(filter(None, blocks)))


if __name__ == "__main__":
    # Under its own name: the checks that are imported now are those that it asks.
    from anygauge.testing import process

    process.import_checks(sys.argv[1])
    process.main(sys.argv[1])
