"""A rank of somebody else's launch, from its fresh interpreter on (`anygauge.launch.join`).

It is what a supervisor would have started, but that it meets the others at the launcher's address
(`anygauge.launch.foreign_meeting`), shows its own events, and is watched by its launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.attempt import SIGNALS
from anygauge.launch.foreign import ForeignLaunch
from anygauge.launch.foreign_meeting import agree, job_of, meeting_store
from anygauge.launch.foreign_prepare import RefusedError, prepare_with_others, say_refusal
from anygauge.launch.run_directory import remove_unaccepted
from anygauge.launch.view import View, explain, show_stopped, where_logs_are
from anygauge.util.console import Console
from anygauge.util.events import EventWriter
from anygauge.util.processes import tie_to_parent
from anygauge.util.text import escape

_NOTICED_S = 0.5
"""In which a launcher notices that another rank has ended, before this one that missed it ends,
too. torchrun looks ten times a second."""


def main(descriptor: int) -> int:
    """Read from a descriptor what came before, and be the rank; returns the exit status."""
    with os.fdopen(descriptor, "rb") as file:
        given = json.load(file)
    launch = ForeignLaunch(**given.pop("launch"))
    if launch.tied:
        # torchrun's ranks, for one, would outlive a torchrun that is killed.
        tie_to_parent(signal.SIGKILL)
    # What a supervisor would take for a request reaches ranks directly here.
    for number in set(SIGNALS) - {signal.SIGTERM}:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        return take_part(launch, **given)
    except AnygaugeError as error:
        if not isinstance(error, RefusedError):
            print(escape(f"error: {error}\n(rank {launch.rank})"), file=sys.stderr)
        launch.report(str(error))
        return error.exit_status


def take_part(
    launch: ForeignLaunch,
    *,
    known: Mapping[str, Any],
    provenance: Mapping[str, Any] | None,
    patience_s: float,
    quiet: bool,
) -> int:
    """Meet the other ranks and train; returns the exit status.

    Args:
        known: the run's ``folder``, as this rank read its arguments, and ``hello``, what must be
            the same on all machines; of rank 0 also what it tells all: the run's ``id``, with
            ``job``, ``done`` or why it is ``refused``.
        provenance: of this machine's environment, from the first rank on it.

    Raises:
        RefusedError: the run cannot start.
        AnygaugeError: the ranks do not find each other, or do not belong together.
    """
    store = meeting_store(launch, patience_s)
    if "refused" in known:
        say_refusal(known["refused"][1])
    answer = agree(store, launch, known, patience_s)
    if "refused" in answer:
        raise RefusedError(*answer["refused"])
    if "done" in answer:
        if launch.rank == 0:
            print(escape(answer["done"]))
        return 0
    job = job_of(launch, known, answer)
    if provenance is not None:
        from anygauge.launch.rank_environment import write_provenance

        write_provenance(job, launch.node_rank, provenance)
    os.chdir(job.working_directory)
    job = prepare_with_others(store, launch, job, quiet=quiet).applied_to(job)
    status = _train(launch, job, answer["lock"], quiet)
    if launch.rank == 0 and status == 0:
        remove_unaccepted(Path(job.run_directory))  # the run was done before
    return status


class _ShownEvents(EventWriter):
    """Shows a rank's events instead of writing them.

    Attributes:
        ending: its last event: ``finished``, ``stopped`` or ``failed``.
    """

    def __init__(self, rank: int, view: View) -> None:
        super().__init__(None, rank)
        self.ending: Mapping[str, Any] = {}
        self._view = view

    def send(self, event: str, **fields: Any) -> None:
        """Show one event. A reader that has gone away is ignored: the run's files tell all."""
        record = {"event": event, "time": time.time(), "rank": self._rank, **fields}
        with self._lock, contextlib.suppress(OSError):
            if event in ("finished", "stopped", "failed"):
                self.ending = record
            self._view.show(record)


def _train(launch: ForeignLaunch, job: Job, lock: str, quiet: bool) -> int:
    """Show the rank while it trains, then how it ended: by rank 0 for all, or why this one failed.

    What libraries print goes to its log, as in any run.
    """
    from anygauge.launch.outcome import stopped_text
    from anygauge.launch.rank_failure import locate_failure, reported_failure
    from anygauge.training.worker import run_reported

    out, err = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    log = job.start_directory / "logs" / f"rank{launch.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        offset = file.seek(0, 2)
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    # Lines, and no bar: the terminal is shared with other ranks and with the launcher.
    view = View(Console(file=out, force_terminal=False), quiet)
    errors = Console(file=err, force_terminal=False)
    events = _ShownEvents(launch.rank, view)
    status = run_reported(job, launch.rank, events, lock)
    kind = events.ending["event"]
    if kind == "failed":
        failure = locate_failure(
            reported_failure(launch.rank, events.ending, time.time()),
            host=socket.gethostname(),
            world_size=job.world_size,
            log=log,
            log_offset=offset,
        )
        text = failure.text
        if failure.final:
            # Not a connection that broke because another rank was killed: there the launcher goes
            # by who ended first.
            launch.report(text, failure.time)
        elif job.world_size > 1:
            time.sleep(_NOTICED_S)
            text += (
                "\nIf another rank ended earlier, that may be the cause: see the output of "
                f"{launch.launcher}, or that rank's log"
            )
        explain(errors, text)
        errors.print(f"logs: {where_logs_are(job.run_directory)}", soft_wrap=True)
    elif launch.rank == 0 and kind == "stopped":
        show_stopped(errors, stopped_text(events.ending))
    elif launch.rank == 0:
        view.summary()
    return status
