"""Runs the kit's code in processes of its own, with the environment that the backend sets.

The backend's code must not run, set variables or crash in the author's pytest. So one process makes
the environment of every rank, as an agent does, and one a rank asks the checks of a part. It writes
a line to its file of answers when a check begins and when it has its verdict. Where a check takes
longer than it may, the process writes its stack to its log and ends. So a check that hangs is
named, and the answers before it stay. Ranks meet in a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Backend, LaunchSettings
from anygauge.launch.rank_environment import NodeEnvironment
from anygauge.registry import BLOCK_VARIABLE, Registry
from anygauge.testing.check import (
    CHECKS,
    COLLECTIVE_TIMEOUT_S,
    FAILED,
    ConformanceCheck,
    Device,
    Verdict,
    progress,
    run_check,
    worst_verdict,
)
from anygauge.testing.leaks import ProcessState
from anygauge.testing.paper import Paper
from anygauge.testing.rules import JOB, NODE, jobs

PARTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "basic": ("on paper", ("paper", "rules", "leaks")),  # which import no torch
    "device": (
        "on a device",
        ("device_checks", "memory_checks", "copies", "chance", "real_sizes", "leaks"),
    ),
    "operators": ("on torch's operators", ("operators",)),
    "ranks": (
        "on {ranks} ranks",
        ("collective_checks", "rank_checks", "memory_checks", "leaks"),
    ),
}
"""What one kind of process is asked: where, in words, and the modules whose checks it asks, those
that say most of a device first."""
RANKS_S = 600.0
"""Seconds that the processes of all ranks may take."""
BEGUN = "begun"
"""Stands for the verdict on what has begun, with how long it may take."""
OPENING, CLOSING, ENDING = "opening the device", "closing the device", "the process"
STEPS_S = {OPENING: 300.0, CLOSING: 60.0, ENDING: 60.0}
"""What else a process does, and the seconds that it may take."""
POLL_S = 0.05
ALONE_S = 30.0
"""Seconds that the other ranks get once one has ended."""
TIMED_OUT = re.compile(r"^Timeout \(\d.*\)!$", re.MULTILINE)
"""Begins the stack that `faulthandler` writes."""
FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
TORCH = "/torch/"


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


def start(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    file: Path,
) -> subprocess.Popen[bytes]:
    """Call a function of the kit in a process of its own, whose log is beside the file.

    Args:
        arguments: JSON.
        file: gets what the function returns, as JSON, unless that is None.
    """
    call = [function.__module__, function.__name__, arguments, str(file)]
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(call)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )


def answer_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    what: str,
    limit_s: float = 120.0,
) -> Any:
    """Return what a function gives in a process of its own; `what` describes that.

    Raises:
        AssertionError: it ended otherwise, or not in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        trouble = run_to_end([start(function, arguments, environment, file)], [file], limit_s)
        assert not trouble and file.exists(), f"asking for {what}: {trouble or 'no answer'}"
        return json.loads(file.read_text(encoding="utf-8"))


def rank_environments(
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
    found, trouble = rank_environments(part, subject, ranks)
    files = [base.with_name(f"{base.name}.rank{rank}.json") for rank in range(ranks)]
    request = {**request, "rendezvous": f"file://{base}.rendezvous"}
    processes = [
        start(function, [{**request, "answers": str(file)}], environment, file)
        for file, environment in zip(files, found, strict=True)
    ]
    ended = run_to_end(processes, files, RANKS_S, what=what)
    return files, "; ".join(filter(None, [trouble, ended]))


def run_to_end(
    processes: Sequence[Any], files: Sequence[Path], limit_s: float, *, what: str = ""
) -> str:
    """Wait until all processes have ended; end those that are left long after another.

    Args:
        processes: by rank, with `poll`, `kill` and `wait` of `subprocess.Popen`.
        files: of their answers; each may have its log beside it.
        limit_s: seconds that they may take in all.
        what: is asked, for `progress`.

    Returns:
        Which did not end in order, and why, in words, the one that came least far first; empty if
        all did.
    """
    deadline, why, shown = time.monotonic() + limit_s, f"after {limit_s:.0f} s", ""
    while left := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        now = time.monotonic()
        if len(left) < len(processes) and now + ALONE_S < deadline:
            deadline, why = now + ALONE_S, f"{ALONE_S:.0f} s after another"
        name = next(reversed(answers_in(files[0])), shown)
        if name != shown:
            shown = name
            progress(f"{what}: {name}")
        if now > deadline:
            break
        time.sleep(POLL_S)
    troubles = []
    for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
        who = f"rank {rank}" if len(files) > 1 else ""
        if rank in left:
            process.kill()
            process.wait()
            troubles.append((len(answers_in(file)), f"{who or ENDING} had not ended {why}"))
        elif status := process.poll():
            troubles.append((len(answers_in(file)), _describe_end(file, status, who)))
    return "; ".join(text for _, text in sorted(troubles))


def _describe_end(answers: Path, status: int, who: str) -> str:
    """``broadcast had not ended after 60 s (in all_reduce, collectives.py:88)``, where a process
    has ended for that, or its status and the end of its log."""
    path = answers.with_suffix(".log")
    log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    _, *stack = TIMED_OUT.split(log)
    name, (result, limit) = next(reversed(answers_in(answers).items()), ("", ("", "")))
    if not stack or result != BEGUN:
        said = last_lines(log)
        return f"{who or ENDING} ended with status {status}" + (f": {said}" if said else "")
    # The main thread comes last. Of calls within torch, the one that led there says more.
    frames = FRAME.finditer(stack[-1].rpartition("Thread 0x")[2])
    own = next((each for each in frames if TORCH not in each["file"]), None)
    place = f" (in {own['function']}, {Path(own['file']).name}:{own['line']})" if own else ""
    return f"{f'{who}: ' if who else ''}{name} had not ended after {limit}{place}"


def last_lines(text: str, count: int = 3) -> str:
    """The end of what a process wrote, on one line."""
    return " | ".join([line for line in text.splitlines() if line.strip()][-count:])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartVerdicts:
    """What a part's processes gave: verdicts by the check's name.

    Attributes:
        trouble: how a process ended if not in order, or why it lacked its environment: why there
            are fewer; empty if there was none.
    """

    verdicts: Mapping[str, Verdict]
    trouble: str = ""

    def of(self, check: ConformanceCheck) -> Verdict:
        """Return the verdict on a check; one that says what happened where there is none."""
        if check.of_the_end:
            return run_check(check.function, self.trouble, None)
        why = f": {self.trouble}" if self.trouble else ""
        return self.verdicts.get(check.name, (FAILED, f"the check was not reached{why}"))


def ask(part: str, subject: Subject, folder: Path, *, ranks: int = 1) -> PartVerdicts:
    """Run every check of one of `PARTS`; the folder gets answers, logs and the meeting point."""
    request = {"part": part, "backend": subject.name, "options": dict(subject.options)}
    what = f"{subject.name} {PARTS[part][0].format(ranks=ranks)}"
    base = folder / f"{part}{ranks}"
    return merge(*run_ranks(main, request, subject, base, part=part, ranks=ranks, what=what))


def merge(files: Sequence[Path], trouble: str = "") -> PartVerdicts:
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
        verdicts[name] = (FAILED, trouble) if broken else worst_verdict(given)
    return PartVerdicts(verdicts=verdicts, trouble=trouble)


def answers_in(path: Path) -> dict[str, Verdict]:
    """What has become of each check, or other step, in the order in which they began; of the last
    it may be `BEGUN`. Empty where there is no such file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return {name: (result, why) for name, result, why in map(json.loads, whole.splitlines())}


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
        return [base] * ranks, f"there is no environment for it: {' '.join(str(error).split())}"


class Answers:
    """Writes one process's file of answers, line by line, so that a crash keeps them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)  # writes each line at once

    def begin(self, name: str) -> None:
        """A check, or one of `STEPS_S`, begins."""
        limit = STEPS_S[name] if name in STEPS_S else CHECKS[name].limit_s
        # A thread of C code, which ends also a process that never returns to Python.
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
        self.write(name, BEGUN, f"{limit:.0f} s")

    def write(self, name: str, result: str, why: str) -> None:
        """A check has its verdict."""
        self._file.write(json.dumps([name, result, why]) + "\n")


def import_checks(part: str) -> None:
    """Register the checks of a part."""
    for name in PARTS[part][1]:
        importlib.import_module(f"anygauge.testing.{name}")


def main(request: Any) -> None:
    """Ask every check of a part; verdicts are written one by one, so that a crash keeps them."""
    part, path = request["part"], Path(request["answers"])
    import_checks(part)
    answers = Answers(path)
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
            verdict = judge(check) if judge else run_check(check.function, state, None)
            if judge:  # on a device a check may change what it likes
                state.note(f"asking whether {check.title}", judged=part == "basic")
            answers.write(check.name, *verdict)


def _on_paper(request: Any, answers: Answers, state: ProcessState) -> None:
    registry = Registry.load(os.environ)
    state.note("importing it")
    paper = Paper(name=request["backend"], options=request["options"], registry=registry)
    _ask_all("basic", answers, state, lambda each: run_check(each.function, paper, None))
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
        from anygauge.testing.operators import op_infos

        op_infos()  # their import takes longer than a check
    backend = fresh()
    collectives = backend.support("collectives")
    absent, subject = None, None
    if part == "ranks" and not collectives:  # then they must not even open
        absent = run_check(lambda _: _open_backend(request, backend, fresh), None, collectives)
    else:
        subject = _open_backend(request, backend, fresh)

    def judge(check: ConformanceCheck) -> Verdict:
        if absent is not None:
            return absent
        declared = None if check.capability is None else backend.support(check.capability)
        function = (lambda on: on.ask(check)) if part == "ranks" else check.function
        return run_check(function, subject, declared)

    state.note("importing and opening it")
    _ask_all(part, answers, state, judge)
    answers.begin(CLOSING)
    try:
        backend.close()
    finally:
        state.note("closing")
        _ask_all(part, answers, state)


def _open_backend(request: Any, backend: Backend, fresh: Callable[[], Backend]) -> Any:
    """What the part's checks get, with the backend opened for it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = backend.open(rank)
    if request["part"] != "ranks":
        return Device(backend=backend, device=device, fresh=fresh)
    from anygauge.testing.rank_context import RankContext  # which imports torch

    backend.collectives.open(
        rendezvous=request["rendezvous"],
        rank=rank,
        world_size=world_size,
        timeout_s=COLLECTIVE_TIMEOUT_S,
        device=device,
    )
    return RankContext(backend=backend, device=device, rank=rank, world_size=world_size)


if __name__ == "__main__":
    _module, _name, _arguments, _file = json.loads(sys.argv[1])
    _found = getattr(importlib.import_module(_module), _name)(*_arguments)
    if _found is not None:
        Path(_file).write_text(json.dumps(_found), encoding="utf-8")
