"""Before ranks start: read what the agent is given, place the run file, fetch the model.

An agent's parent may be on another machine; then its standard input connects the two. Machines may
not see the files of the one that submitted the job; then the job file contains the run file
(`Job.run_text`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.decision import Decision
from anygauge.launch.nodes import Nodes
from anygauge.launch.prepare_here import prepare_here
from anygauge.launch.run_directory import RUN_FILE, write_run
from anygauge.util.files import write_text

OWNER = "job.sha256"
"""In a run directory: digest of the job that it belongs to."""

_SIGNALS = {b"SIGTERM\n": signal.SIGTERM, b"SIGINT\n": signal.SIGINT}
_TURN_S = 0.1


class StartAbortedError(AnygaugeError):
    """Another node has failed, or the user ended the job: no rank starts on this node."""


def read_standard_input() -> list[str]:
    """Take arguments and variables from the first line of standard input, and then signals.

    The line is a JSON object: ``arguments``, a list, and ``environment``, name -> value or null to
    unset. No shell sees any of it. Each later line names a signal for this agent. The end of the
    input counts as SIGHUP: a parent that dies closes its end, however it died, and ssh passes that
    on.

    Returns:
        The arguments.

    Raises:
        AnygaugeError: there is no such line.
    """
    # Without a buffer, this takes the first line and leaves the rest to the thread.
    given = io.FileIO(0, closefd=False)
    line = given.readline()
    if not line:
        raise AnygaugeError("standard input ended before the line of arguments")
    try:
        record = json.loads(line)
        arguments = [str(each) for each in record["arguments"]]
        for name, value in record["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise AnygaugeError(
            f"standard input: the line of arguments cannot be read: {error!r}"
        ) from error
    threading.Thread(target=_relay, args=(given,), name="standard-input", daemon=True).start()
    return arguments


def _relay(given: io.FileIO) -> None:
    with contextlib.suppress(OSError):
        for line in given:
            if line in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[line])
    os.kill(os.getpid(), signal.SIGHUP)


def expand_variables(argument: str, absent: str | None = None) -> str:
    """An argument, with the values of variables in place of each ``$NAME``.

    Args:
        absent: the value of one that is unset or empty; None: an error.

    Raises:
        AnygaugeError: such a variable is not set.
    """

    def value(found: re.Match[str]) -> str:
        known = os.environ.get(found[1]) or absent
        if known is None:
            raise AnygaugeError(
                f"{argument}: the variable {found[1]} is not set here. This agent was not started "
                "in the way that its launcher expects"
            )
        return known

    return re.sub(r"\$(\w+)", value, argument)


def read_secrets(folder: str) -> dict[str, str]:
    """Variables from a folder that has one file for each, named like it."""
    return {
        # As the system hands them to programs, also those that are no text.
        file.name: os.fsdecode(file.read_bytes())
        for file in Path(folder).iterdir()
        # A mounted volume keeps its versions in folders beside them.
        if file.is_file() and not file.name.startswith(".")
    }


def log_to(path: Path) -> None:
    """Send this process's standard error to a file that stays with the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
    except OSError as error:
        raise AnygaugeError(
            f"{path} cannot be written on {socket.gethostname()}: {error.strerror}. The folder of "
            "a run must be on storage that all its nodes share (--output)"
        ) from error


def claim_run_directory(job: Job, node_rank: int) -> None:
    """Check that the run directory is this job's, before anything is written there.

    The coordinator marks it as this job's and writes the run file. If the job resumes another
    job's run, the run file goes to a folder of its own below `ATTEMPTS`, and that run's files stay
    as they are until the ranks accept the start. A cluster may start the same job again with all
    its containers: that attempt finds its own mark, and resumes from the newest checkpoint.

    Raises:
        AnygaugeError: the run directory holds the run of another job, or cannot be written.
    """
    folder = Path(job.run_directory)
    own = hashlib.sha256((job.token + job.run_text).encode()).hexdigest()
    with _write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / OWNER
        if not job.takes_over and _is_taken(mark, own, coordinator=node_rank == 0):
            raise AnygaugeError(
                f"{folder} holds another job's run: give this one another 'name', or resume that "
                "one with --resume auto"
            )
        path = Path(job.run_file)
        if path.parent != folder and _holds_another_run(mark, own):
            # Every machine's logs of this start go there.
            path.parent.mkdir(parents=True, exist_ok=True)
        if node_rank == 0 and job.start_directory == folder:
            write_text(mark, own + "\n")  # first: a run without a mark counts as another job's
            _write_run(job)
        elif node_rank == 0:
            _write_run(job)
            write_text(mark, own + "\n")


def place_run_file(job: Job) -> None:
    """Write the run file where this machine's ranks read it, once the nodes have met.

    Raises:
        AnygaugeError: it cannot be written.
    """
    path = job.resolved_run
    with _write_errors(path.parent):
        if not path.exists() or path.read_text() != job.run_text:
            write_text(path, job.run_text, 0o600)


def _write_run(job: Job) -> None:
    from anygauge.config.resolved import parse_run  # only the coordinator needs the schema

    write_run(job.resolved_run, parse_run(job.run_text))


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AnygaugeError(
            f"{folder} cannot be written: {error}. It must be on the storage that the job mounts"
        ) from error


def _holds_another_run(mark: Path, own: str) -> bool:
    # In this order: the coordinator may be marking an empty folder now.
    there = (mark.parent / RUN_FILE).exists()
    return mark.read_text().strip() != own if mark.exists() else there


def _is_taken(mark: Path, own: str, *, coordinator: bool) -> bool:
    if mark.exists():
        return mark.read_text().strip() != own
    # The coordinator marks it first, so what it finds without a mark was there before.
    left = ("metrics.jsonl", "checkpoints")
    return coordinator and any((mark.parent / name).exists() for name in left)


def prepare_on_all(
    job: Job,
    nodes: Nodes,
    environment: Mapping[str, str],
    node_rank: int,
    host: str,
    requests: Sequence[object] = (),
) -> Decision:
    """Prepare the run on this node, and wait until all nodes have: its model is fetched; where the
    nodes see no files of the command's machine, model and rows are checked here; node 0 plans.

    The nodes exchange messages meanwhile, so that a failure on one of them ends the others.

    Args:
        environment: of the process that does it.
        requests: not empty once this agent is asked to end: then it returns at once, and the
            supervisor handles the request.

    Returns:
        What node 0 has decided for all.

    Raises:
        AnygaugeError: the model cannot be fetched, or what ranks would refuse; names the node.
        StartAbortedError: another node ends the job.
    """

    def turn() -> bool:
        if nodes.poll():
            raise StartAbortedError("no rank was started here")
        return not requests

    def log(text: str) -> None:
        nodes.send("message", level="info", text=text)

    where = f"node {host}: " if job.launch.nodes > 1 else ""
    check, plan = bool(job.run_text), node_rank == 0
    decided = prepare_here(job, environment, where, log, turn, check=check, plan=plan)
    if not requests:
        nodes.mark_ready(decided)
    while not nodes.all_ready and turn():
        time.sleep(_TURN_S)
    return nodes.decided
