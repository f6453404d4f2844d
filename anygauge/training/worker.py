"""What one rank of a run does: open the device, train, save, report.

Its environment was decided before this process began; nothing here sets a variable for a device.
Whatever goes wrong is reported as one event; the traceback goes to the rank's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anygauge.interface import (
    STOPPED,
    AnygaugeError,
    Backend,
    Job,
    NonFiniteLossError,
)
from anygauge.training.progress import Progress
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.rendezvous import STORE_FD
from anygauge.util.run_lock import check_lock
from anygauge.util.text import first_line, json_values

GIB = 2**30


def run_reported(job: Job, index: int, events: EventWriter, lock: str | None) -> int:
    """Run a rank whose environment is decided, and report how it ended; returns the exit status.

    Args:
        lock: see `run_rank`.
    """
    opened = contextlib.ExitStack()
    try:
        outcome = run_rank(job, index, events, opened, lock)
    # A failure is reported before anything is closed: peers would report a broken connection
    # first. What is open then ends with the process.
    except BaseException as error:
        traceback.print_exc()
        return events.report_failure(error)
    opened.close()
    if isinstance(outcome, StoppedRun):
        events.send("stopped", step=outcome.step, checkpoint=outcome.checkpoint)
        return STOPPED
    events.send("finished", **({"summary": outcome} if index == 0 else {}))
    return 0


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that a user ended early: the steps done, and the checkpoint to resume from."""

    step: int
    checkpoint: str


def run_rank(
    job: Job,
    index: int,
    events: EventWriter,
    opened: contextlib.ExitStack,
    lock: str | None = None,
) -> dict[str, Any] | StoppedRun:
    """Open the device, train, save; returns the run's summary, or where it stopped.

    Args:
        opened: takes what must be closed once all is done.
        lock: the run directory's (`identity_of`), which the starting process holds open; without
            it, nobody notices that the folder was moved.
    """
    folder = Path(job.run_directory)
    progress = Progress(events)
    opened.enter_context(progress.reporting())
    importing = opened.enter_context(contextlib.ExitStack())
    with progress.long_work("start-up"):
        from anygauge.config.resolved import read_run
        from anygauge.registry import installed_plugins

        run = read_run(job.resolved_run)
        hiding = unused_hidden(few_bits=run.may_use_bitsandbytes, trackers=run.trackers)
        importing.enter_context(hiding)
        from anygauge.training.auto import decide_strategy, decided_before
        from anygauge.training.build_strategy import create_strategy
        from anygauge.training.checkpoints.identity import REPORT, FinishedError, settings_of
        from anygauge.training.checkpoints.manager import checkpoint_folder
        from anygauge.training.save import save_result, summary_of, used_versions
        from anygauge.training.setup import Rank, open_device, prepare_run

        rank = Rank(
            index=index,
            local=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            events=events,
            progress=progress,
            listener=int(os.environ[STORE_FD]) if STORE_FD in os.environ else None,
            lock=lock if index == 0 else None,
        )
        if rank.world_size != job.world_size:
            raise AnygaugeError(
                f"WORLD_SIZE is {rank.world_size}, but job.json expects {job.world_size} ranks"
            )
        began = time.monotonic()
        registry = installed_plugins()
        run = decided_before(run, job, registry)
        backend = open_device(job, rank, run, registry)
        run, why = decide_strategy(run, registry, backend, rank.index, rank.world_size)
        if why:
            job = replace(job, strategy=run.strategy.name, strategy_why=why)
        strategy = create_strategy(registry, run)
    opened.callback(backend.close)
    limit = job.launch.collective_timeout_s
    with out_of_memory_advice(backend):
        try:
            with progress.unlike_others("start-up", backend.collectives, then_limit_s=limit):
                prepared = prepare_run(job, run, rank, registry, backend, strategy)
        except FinishedError as done:
            rank.log(str(done))
            return done.finished.summary
        try:
            importing.close()
            start_s = time.monotonic() - began
            for library in backend.collectives.set_timeout(limit):
                rank.warn(
                    f"launch.collective_timeout_s: {library} cannot change the limit of its "
                    "existing groups; if a rank hangs in one of them, only its supervisor ends it"
                )
            opened.callback(prepared.engine.close)
            # Until the end: a request that comes while the result is saved comes too late.
            stops = not (prepared.engine.refuses_checkpoints or job.evaluates)
            if stops:
                opened.enter_context(prepared.loop.pending.stop.listening())
            if index == 0:
                say_that_it_started(job, rank, prepared, stops)
                check_lock(folder, lock)
                text = json.dumps(used_versions(prepared.spec), indent=2)
                write_text(folder / "versions.json", text + "\n")
            summary: dict[str, Any] = {}
            reason = None if job.evaluates else prepared.loop.run()
            if reason == "early_stopping":
                rank.log(str(prepared.loop.why_early()))
            if reason is None:
                prepared.loop.evaluate(0)
                summary = summary_of(job, prepared)
            elif reason != "request":
                collectives = backend.collectives
                with progress.unlike_others("saving the result", collectives, then_limit_s=limit):
                    summary = save_result(job, rank, prepared)
                summary["planned_steps"] = prepared.loop.batches.steps
                summary["stopped_by"] = None if reason == "steps" else reason
        except BaseException as error:
            prepared.logger.close("failed")
            if isinstance(error, NonFiniteLossError) and prepared.logger.history.step == 0:
                with progress.long_work("looking at the base's weights"):
                    prepared.factory.check_numbers()
            raise
        prepared.logger.close("stopped" if reason == "request" else "finished")
        if reason == "request":
            step = prepared.logger.history.step
            return StoppedRun(step, str(checkpoint_folder(folder, step)))
    if troubles := prepared.logger.trackers.troubles:
        summary["trackers"] = "; ".join(troubles)
    summary["start_s"] = start_s
    summary["seconds"] = time.monotonic() - began
    if index == 0:
        report = {**summary, "identity": prepared.identity, "settings": settings_of(run)}
        text = json.dumps(json_values(report), indent=2, allow_nan=False)
        check_lock(folder, lock)
        write_text(folder / REPORT, text + "\n")
    return summary


def say_that_it_started(job: Job, rank: Any, prepared: Any, stops: bool) -> None:
    """Tell whoever reads the events what trains, and how long."""
    steps = prepared.loop.batches.steps
    rank.events.send(
        "started",
        steps=steps,
        world_size=rank.world_size,
        device=str(prepared.loop.backend.placement.device),
        done=prepared.loop.start,
        stops=stops,
        lines=[
            f"training: {steps} steps on {rank.world_size} "
            f"{'rank' if rank.world_size == 1 else 'ranks'}, backend {job.backend}, "
            f"strategy {prepared.choices['strategy']}"
        ],
    )


@contextlib.contextmanager
def out_of_memory_advice(backend: Backend) -> Iterator[None]:
    """Turn a device's out-of-memory error into one that says what held how much, and torch's
    refusal of an operation into one that names the field."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and "use_deterministic_algorithms" in str(error):
            raise AnygaugeError(
                f"train.deterministic: {first_line(error)} Choose another kernel for it (kernels, "
                "model.attention), or leave train.deterministic out"
            ) from error
        if not backend.placement.is_out_of_memory(error):
            raise
        stats = backend.placement.memory()
        limit = f" of {stats.limit / GIB:.1f} GiB" if stats.limit else ""
        raise AnygaugeError(
            f"out of memory on {backend.placement.device}: {stats.in_use / GIB:.1f} GiB in use, "
            f"peak {stats.peak / GIB:.1f} GiB{limit}. Lower train.micro_batch_size or "
            "data.max_length, switch train.gradient_checkpointing or activation_offloading on, or "
            "shard over more --devices"
        ) from error


@contextlib.contextmanager
def unused_hidden(*, few_bits: bool, trackers: Collection[str]) -> Iterator[None]:
    """Within it, libraries do not find what a run does not use; afterwards all can be imported.

    Args:
        few_bits: the run may use bitsandbytes. Otherwise that is hidden, which PEFT imports, and
            with it torch's compiler.
        trackers: any of which may use mlflow. DeepSpeed's tuner does the same with that.
    """
    names = [n for n, used in (("bitsandbytes", few_bits), ("mlflow", trackers)) if not used]
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]
