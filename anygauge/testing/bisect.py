"""Why the loop fails: the first operation, module, gradient or update that leaves the host.

A process of its own trains a run that was found wrong once more, with the backend's environment:
``python -m anygauge.testing.bisect`` reads a request from standard input as JSON, and writes the
cause, in words, to the file that it names. It looks for

1. the first operation whose result is not what float64 gives on the host for the same inputs;
2. else, in the first step, the first module whose output differs from the host's, the first
   parameter whose gradient does, and the first that is updated otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import Backend, Job
from anygauge.testing.process import Subject, environments, last_lines

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge.training.setup import PreparedRun

TIMEOUT_S = 300.0
ALONE_S = 15.0
"""How long the other ranks may take once one has ended without having searched."""
POLL_S = 0.1
NOT_FOUND = "the cause was not found"


def cause_of(
    subject: Subject, folder: Path, found: Path, wanted: Path, step: int, *, dtype: str
) -> str:
    """Where the device first leaves the host, as a sentence without its end; never raises.

    Args:
        folder: for the answer and logs.
        found: folder of the device's run, on one rank.
        wanted: folder of the host's.
        step: the first whose loss differs, from 1; later ones are not looked at.
    """
    request = {
        "question": "training",
        "found": str(found),
        "wanted": str(wanted),
        "steps": step,
        "dtype": dtype,
    }
    return _answer(subject, folder, f"cause-{found.name}", request)


def cause_of_resume(subject: Subject, folder: Path, whole: Path, checkpoint: Path) -> str:
    """The first operation of a resumed run that gives other values than the undisturbed one.

    Args:
        whole: folder of the undisturbed run, on one rank.
    """
    request = {"question": "resume", "found": str(whole), "checkpoint": str(checkpoint)}
    return _answer(subject, folder, f"cause-{whole.name}-resumed", request)


def cause_of_ranks(
    subject: Subject, folder: Path, found: Path, ranks: int, step: int, checkpoint: Path | None
) -> str:
    """The first collective, or operation of a rank, that is wrong in a run on several ranks.

    Args:
        found: folder of the run.
        step: the first whose loss differs, from 1; later ones are not looked at.
        checkpoint: that the run was resumed from.
    """
    base = folder / f"cause-{found.name}"
    request = {
        "question": "ranks",
        "found": str(found),
        "steps": step,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "rendezvous": f"file://{base}.rendezvous",
        "exchanged": str(base),
    }
    trouble = _asked(subject, folder, base.name, request, ranks=ranks)
    # A rank that could not search says why; the others then wait for it in vain.
    answers = [_read(folder / f"{base.name}.{rank}.json") for rank in range(ranks)]
    failed = [f"{said} (rank {rank})" for rank, said in enumerate(answers) if _is_none(said)]
    if failed or trouble:
        return failed[0] if failed else trouble
    request = {"question": "exchanged", "exchanged": str(base), "ranks": ranks}
    return _answer(subject, folder, f"{base.name}-exchanged", request)


def _answer(subject: Subject, folder: Path, name: str, request: Mapping[str, Any]) -> str:
    """The cause that a process found, or why it found none."""
    trouble = _asked(subject, folder, name, request)
    if trouble:
        return trouble
    return _read(folder / f"{name}.0.json")


def _read(answer: Path) -> str:
    """What a process answered; empty where it did not."""
    return str(json.loads(answer.read_text(encoding="utf-8"))["cause"]) if answer.exists() else ""


def _is_none(cause: str) -> bool:
    return cause.startswith(NOT_FOUND)


def _asked(
    subject: Subject, folder: Path, name: str, request: Mapping[str, Any], ranks: int = 1
) -> str:
    """Have a process for each rank answer; returns why one did not, empty if all did."""
    part = "device" if ranks == 1 else "ranks"
    try:
        found, trouble = environments(part, subject, ranks, folder)
        if trouble:
            return f"{NOT_FOUND}: {trouble}"
        answers = [folder / f"{name}.{rank}.json" for rank in range(ranks)]
        processes = []
        for answer, environment in zip(answers, found, strict=True):
            with answer.with_suffix(".log").open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "anygauge.testing.bisect"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                )
            assert process.stdin is not None
            process.stdin.write(json.dumps({**request, "answer": str(answer)}).encode())
            process.stdin.close()
            processes.append(process)
        troubles = []
        begun = time.monotonic()
        deadline = begun + TIMEOUT_S
        while any(process.poll() is None for process in processes):
            ended = [a for a, p in zip(answers, processes, strict=True) if p.poll() is not None]
            if any(not answer.exists() or _is_none(_read(answer)) for answer in ended):
                deadline = min(deadline, time.monotonic() + ALONE_S)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for answer, process in zip(answers, processes, strict=True):
            status = process.poll()
            if status is None:
                process.kill()
                process.wait()
                took = time.monotonic() - begun
                troubles.append(f"{NOT_FOUND} within {took:.0f} s")
            elif not answer.exists():
                said = last_lines(answer.with_suffix(".log"))
                troubles.append(f"{NOT_FOUND}: the search ended with status {status}: {said}")
    except Exception as error:  # the failure that is explained must be reported all the same
        return f"{NOT_FOUND}: {type(error).__name__}: {error}"
    return troubles[0] if troubles else ""


# -- in the process -------------------------------------------------------------------------------


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.read())
    try:
        cause = QUESTIONS[request["question"]](request)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        cause = f"{NOT_FOUND}: looking for it raised {type(error).__name__}: {lines[0]}"
    Path(request["answer"]).write_text(json.dumps({"cause": cause}), encoding="utf-8")


def prepared(
    folder: Path,
    name: str,
    *,
    backend: Backend | None = None,
    checkpoint: str | None = None,
    rendezvous: str | None = None,
) -> PreparedRun:
    """A run, ready for its first step once more, in a folder beside its own.

    Args:
        folder: of the run.
        name: what is added to the folder's.
        backend: an open one, of an earlier call; None opens the run's.
        checkpoint: resume from it.
        rendezvous: where its ranks meet; None for one rank.
    """
    from anygauge.config.resolved import read_run
    from anygauge.registry import Registry
    from anygauge.training.checkpoints.manager import NEVER
    from anygauge.training.progress import Progress
    from anygauge.training.setup import Rank, open_device, prepare_run
    from anygauge.training.strategy import create_strategy
    from anygauge.util.events import EventWriter

    registry = Registry.load()
    run = read_run(folder / "run.json")
    resumed = run.checkpoint.model_copy(update={"resume": checkpoint or NEVER})
    run = run.model_copy(update={"checkpoint": resumed})
    home = folder.with_name(f"{folder.name}-{name}")
    home.mkdir(exist_ok=True)
    job = Job.load(folder / "job.json")
    job = replace(job, run_directory=str(home), run_file=str(home / "run.json"), resume=False)
    if rendezvous is not None:
        job = replace(job, rendezvous=rendezvous)
    events = EventWriter(None)
    rank = Rank(
        index=int(os.environ["RANK"]),
        local=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        events=events,
        progress=Progress(events),
    )
    if backend is None:
        backend = open_device(job, rank, run, registry)
    return prepare_run(job, run, rank, registry, backend, create_strategy(registry, run))


def one_step(run: PreparedRun, index: int) -> None:
    """Forward, backward and update of a step, as the loop does them."""
    from anygauge.training.moving import LazyBatches
    from anygauge.training.schedule import learning_rate

    loop = run.loop
    batches = LazyBatches(loop.batches.step(index), loop.to_device)
    tokens = loop.batches.num_loss_tokens(index)
    loop.engine.run_step(batches, loop.loss_function, tokens)
    section = loop.settings
    lr = learning_rate(index, loop.batches.steps, section.optimizer.lr, section.schedule)
    loop.engine.update(lr, section.max_grad_norm)


def evaluate_if_due(run: PreparedRun, done: int) -> None:
    """Evaluate where the loop would after so many steps."""
    loop = run.loop
    if done % loop.settings.eval_every:
        return
    for batches, _ in loop.evaluations.values():
        loop.engine.evaluate(map(loop.to_device, batches), loop.loss_function)


def _training(request: Mapping[str, Any]) -> str:
    """The first operation, or what else of the first step."""
    folder = Path(request["found"])
    found = prepared(folder, "again")
    backend = found.loop.backend
    place, seen = first_operation(found, backend.device_type, request["steps"])
    if place:
        return place
    from anygauge.testing.compare import first_difference, recorded

    mine = prepared(folder, "compared", backend=backend)
    theirs = prepared(Path(request["wanted"]), "compared")
    # The host pads rows as the device does, so that each value has one of the host's beside it.
    theirs = replace(theirs, loop=replace(theirs.loop, batches=mine.loop.batches))
    here, there = recorded(mine, one_step), recorded(theirs, one_step)
    return first_difference(here, there, request["dtype"]) or f"{NOT_FOUND}: {seen}"


def first_operation(run: PreparedRun, device_type: str, steps: int) -> tuple[str, str]:
    """(The first operation that leaves the host, what was compared): the first empty if none does.

    Args:
        steps: to look at.
    """
    from anygauge.testing.place import place_in
    from anygauge.testing.replay import Replay

    with place_in(run.engine.model) as place:
        for index in range(steps):
            with Replay(device_type, place) as replay:
                evaluate_if_due(run, index)
                evaluating = replay.found is not None
                one_step(run, index)
                if index + 1 == steps:
                    evaluate_if_due(run, steps)
            if replay.found is not None:
                departure, module = replay.found
                when = "the evaluation before step" if evaluating else "step"
                return (
                    f"the device leaves the host first in {departure}{module}, {when} {index + 1}: "
                    f"{departure.why}"
                ), ""
    unknown = ", ".join(f"aten::{name}" for name in sorted(replay.unknown))
    seen = (
        f"of step {steps} the host repeated {replay.compared} operations in float64 from the "
        "device's inputs, and each agrees"
    )
    return "", seen + (f"; it cannot repeat {unknown}" if unknown else "")


# -- a resumed run beside the undisturbed one ------------------------------------------------------


def _resume(request: Mapping[str, Any]) -> str:
    """The first operation that gives other values after the resume."""
    folder, checkpoint = Path(request["found"]), Path(request["checkpoint"])
    whole = prepared(folder, "again")
    backend = whole.loop.backend
    done = int(json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))["step"])
    for index in range(done):
        one_step(whole, index)
    state = _state(whole)
    undisturbed = _values(whole, backend.device_type, done)
    resumed = prepared(folder, "resumed", backend=backend, checkpoint=str(checkpoint))
    for (name, key), value in _state(resumed).items():
        if not state[name, key].equal(value):
            what = "the parameter" if key == "parameter" else f"the optimizer's {key} of"
            return f"what is restored differs first in {what} {name}"
    again = _values(resumed, backend.device_type, done)
    for number, (before, after) in enumerate(zip(undisturbed, again, strict=False), start=1):
        if before != after:
            return (
                f"after the resume the first values that differ are those of {after[0]}"
                f"{after[1]}, step {done + 1}, operation {number}"
            )
    return f"{NOT_FOUND}: in one process the resumed step {done + 1} is the undisturbed one"


def _state(run: PreparedRun) -> dict[tuple[str, str], Tensor]:
    return {
        (name, key): value for name, key, value in run.engine.export_state() if value is not None
    }


def _values(run: PreparedRun, device_type: str, index: int) -> list[tuple[str, str, bytes]]:
    """(Operation, where, digest of what it gave) of all of a step."""
    from anygauge.testing.compare import Digests
    from anygauge.testing.place import place_in

    with place_in(run.engine.model) as place, Digests(device_type, place) as digests:
        one_step(run, index)
    return digests.found


# -- ranks side by side ---------------------------------------------------------------------------


def _ranks(request: Mapping[str, Any]) -> str:
    """Record what this rank exchanges, and its first operation that leaves the host."""
    import torch

    from anygauge.testing.exchanged import recorded
    from anygauge.testing.place import place_in
    from anygauge.testing.replay import Replay

    run = prepared(
        Path(request["found"]),
        "again",
        checkpoint=request["checkpoint"],
        rendezvous=request["rendezvous"],
    )
    backend = run.loop.backend
    first, wrong, after = run.loop.start, "", -1
    with recorded() as exchanges, place_in(run.engine.model) as place:
        for index in range(first, request["steps"]):
            with Replay(backend.device_type, place) as replay:
                one_step(run, index)
            if replay.found is not None:
                departure, module = replay.found
                wrong = f"{departure}{module}, step {index + 1}: {departure.why}"
                after = len(exchanges)
                break
    path = f"{request['exchanged']}.{os.environ['RANK']}.pt"
    torch.save({"exchanges": exchanges, "place": wrong, "after": after}, path)
    backend.close()
    return wrong


def _exchanged(request: Mapping[str, Any]) -> str:
    """The first wrong collective or operation of what ranks recorded."""
    import torch

    from anygauge.testing.exchanged import first_wrong

    found = [
        torch.load(f"{request['exchanged']}.{rank}.pt", weights_only=False)
        for rank in range(request["ranks"])
    ]
    number, wrong = first_wrong([each["exchanges"] for each in found])
    for rank, each in enumerate(found):
        if each["place"] and (not wrong or each["after"] <= number):
            return f"the device leaves the host first on rank {rank} in {each['place']}"
    if wrong:
        return f"the ranks leave the host first in {wrong}"
    count = len(found[0]["exchanges"])
    return f"{NOT_FOUND}: each of {count} collectives gives what the host makes of its inputs"


QUESTIONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "training": _training,
    "resume": _resume,
    "ranks": _ranks,
    "exchanged": _exchanged,
}

if __name__ == "__main__":
    # Under its own name, as what it imports knows it.
    from anygauge.testing.bisect import main as run_main

    run_main()
