"""``python -m anygauge.launch.agent``: the one process that every launcher starts on each node."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from anygauge.interface import LOST, AnygaugeError, Job
from anygauge.launch.attempt import Requests
from anygauge.launch.decision import Decision
from anygauge.launch.foreign import without_launcher
from anygauge.launch.hello import Hello
from anygauge.launch.meeting import CancelledError, meet
from anygauge.launch.nodes import Instruction, Nodes
from anygauge.launch.outbox import Outbox
from anygauge.launch.outcome import JobFailure, NodeReport
from anygauge.launch.rank_environment import NodeEnvironment, write_provenance
from anygauge.launch.rank_start import RankArgv, rank_argv
from anygauge.launch.startup import (
    StartAbortedError,
    claim_run_directory,
    expand_variables,
    log_to,
    place_run_file,
    prepare_on_all,
    read_secrets,
    read_standard_input,
)
from anygauge.launch.supervisor import GRACE_S, Supervisor
from anygauge.util.processes import die_with_parent, tie_to_parent
from anygauge.util.run_lock import identity_of, open_lock

_REPORTING_S = 30.0
_CAUSE_SIZE = 4000
_PARENT_FORWARDS_S = 2.0
_PARENT_ENDS_S = 2.0


def main(argv: Sequence[str] | None = None, *, argv_of_rank: RankArgv | None = None) -> int:
    """Run the ranks of one node.

    Args:
        argv: command line; None for this process's own.
        argv_of_rank: see `Supervisor.rank_argv`; None for that of `rank_argv`.

    Returns:
        The exit status of this node's part of the job.
    """
    # SIGTERM rather than SIGKILL: the agent must end its ranks.
    die_with_parent(signal.SIGTERM)
    return _Agent(argv_of_rank).run(sys.argv[1:] if argv is None else argv)


class _Agent:
    """One node's agent from its command line to its exit status."""

    def __init__(self, argv_of_rank: RankArgv | None) -> None:
        self._argv_of_rank = argv_of_rank
        self._outbox = Outbox(sys.stdout.fileno())
        self._nodes: Nodes | None = None
        self._node_rank, self._host = -1, socket.gethostname()
        # Collected from now on, also between two attempts: the first process of a container does
        # not even receive signals that it does not handle.
        self._requests = Requests()
        self._requests.collect_signals()

    def run(self, argv: Sequence[str]) -> int:
        """Run; every failure is reported. Returns the exit status."""
        arguments: argparse.Namespace | None = None
        try:
            more = read_standard_input() if "--stdin" in argv else []
            arguments = _parse([*argv, *more])
            status = self._run(arguments)
        except Exception as error:
            status = error.exit_status if isinstance(error, AnygaugeError) else 1
            text = str(error)
            if isinstance(error, AnygaugeError | OSError):
                print(text, file=sys.stderr)
            else:
                traceback.print_exc()
                text = f"the agent of node {self._node_rank} failed: {type(error).__name__}: {text}"
            status = self._report(status, "" if isinstance(error, StartAbortedError) else text)
        if self._nodes is not None:
            self._nodes.close()
        self._outbox.close()
        if arguments is not None and status:
            if arguments.cause_file is not None:
                self._write_cause(Path(arguments.cause_file))
            if arguments.parent_too and status == LOST:
                _end_parent()
        return status

    def _run(self, arguments: argparse.Namespace) -> int:
        if arguments.tied:
            tie_to_parent(signal.SIGTERM)
        if arguments.variables is not None:
            os.environ.update(json.loads(Path(arguments.variables).read_text()))
        if arguments.secrets is not None:
            os.environ.update(read_secrets(arguments.secrets))
        inherited = without_launcher(os.environ)
        self._node_rank = int(expand_variables(arguments.node_rank))
        if arguments.events is not None:
            mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._outbox = Outbox(os.open(arguments.events, mode, 0o644), shared=True)
        resume = int(expand_variables(arguments.attempt, absent="0")) > 0
        job = Job.load(arguments.job)
        if job.run_text:
            claim_run_directory(job, self._node_rank)
            resume = True
        # Devices have other numbers on other machines: an agent takes the lock that it finds or
        # makes. It is open until this process ends.
        lock = identity_of(open_lock(Path(job.run_directory)))
        if job.launch.nodes > 1:
            log_to(job.start_directory / "logs" / f"agent{self._node_rank}.log")
        if job.working_directory:
            os.chdir(job.working_directory)
        own = NodeEnvironment(job, self._node_rank, inherited)
        write_provenance(job, self._node_rank, own.record())
        nodes = self._nodes = self._meet(job, arguments.coordinator, own)
        if job.run_text:
            place_run_file(job)
        if self._node_rank == 0 and job.launch.nodes > 1:
            text = f"network between machines: {own.fabric.name or 'any'} ({own.fabric.why})"
            nodes.send("message", level="info", text=text)
        decided: Decision | None = None
        if job.prepare or job.run_text:
            decided = prepare_on_all(
                job, nodes, own.of_rank(0), self._node_rank, self._host, self._requests.received
            )
        return Supervisor(
            job,
            nodes,
            node_rank=self._node_rank,
            rank_argv=self._argv_of_rank or partial(rank_argv, arguments.job, lock, decided),
            rank_environment=own.of_rank,
            requests=self._requests,
            grace_s=arguments.grace,
            cores=own.cores,
            lock=lock,
            resume=resume,
        ).run()

    def _meet(self, job: Job, coordinator: str, own: NodeEnvironment) -> Nodes:
        """Meet the agents of the job's other nodes, if it has any.

        Raises:
            AnygaugeError: they cannot be reached, or do not belong to one job.
        """
        if job.launch.nodes == 1:
            return Nodes(job, self._outbox)
        hello = Hello(
            node_rank=self._node_rank,
            host=self._host,
            nodes=job.launch.nodes,
            devices_per_node=job.launch.devices,
            fabric=own.fabric.name,
            settings=own.digests(),
        )
        host, _, port = expand_variables(coordinator).rpartition(":")
        address = (host.strip("[]"), int(port))
        return meet(job, self._outbox, hello, address, self._requests.received)

    def _report(self, status: int, text: str) -> int:
        """Report to the follower, and to the other nodes if they have met, why this agent ends.

        Args:
            text: the cause; empty where another node reports it.

        Returns:
            The exit status: where another node reports the cause, that of the whole job.
        """
        nodes = self._nodes
        state = "cancelled" if status == CancelledError.exit_status else "failed"
        send = self._outbox.send
        if nodes is not None and not nodes.has_outcome:
            send = nodes.send
            failure = JobFailure(time=time.time(), text=text, exit_status=status, final=True)
            failures = (failure,) if text else ()
            nodes.broadcast(Instruction.END)
            nodes.report(NodeReport(node_rank=self._node_rank, host=self._host, failures=failures))
            deadline = time.monotonic() + _REPORTING_S
            while not nodes.has_outcome and time.monotonic() < deadline:
                nodes.poll()
                time.sleep(0.05)
            if not text and nodes.outcome is not None:
                state, status = nodes.outcome.state, nodes.outcome.exit_status
                text = nodes.outcome.cause or ""
        send("ended", state=state, exit_status=status, cause=text, node_rank=self._node_rank)
        return status

    def _write_cause(self, path: Path) -> None:
        """Write the cause where a cluster reads it; clusters keep only the beginning."""
        cause = str(self._outbox.last.get("cause") or "the agent ended without a cause")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(cause[:_CAUSE_SIZE])


def _end_parent() -> None:
    """When a node is lost, end the process that started this one: SIGTERM, then SIGKILL.

    It is a daemon of this job, which would wait for the rest of the job otherwise. It first gets
    some time to forward the last events of this agent.
    """
    parent = os.getppid()
    time.sleep(_PARENT_FORWARDS_S)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, signum)
        deadline = time.monotonic() + _PARENT_ENDS_S
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.05)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m anygauge.launch.agent",
        description="Run the ranks of one node of a job. In the arguments that may be given by a "
        "variable, $NAME is its value.",
    )
    add = parser.add_argument
    add("--job", required=True, help="the job file")
    add("--node-rank", default="0", help="which machine this is, from 0; may be a variable")
    add("--coordinator", default="", help="host:port of node 0; the host may be a variable")
    add("--stdin", action="store_true", help="read more arguments and variables, and end with it")
    add("--events", help="a file for events, instead of standard output")
    add("--variables", help="a JSON file of variables: name -> value")
    add("--secrets", help="a folder with one file for each further variable")
    add("--cause-file", help="where to write why the job failed")
    add("--attempt", default="0", help="above 0: resume from a checkpoint; may be a variable")
    add("--tied", action="store_true", help="end with the process that started this one")
    add("--parent-too", action="store_true", help="see `_end_parent`")
    add("--grace", type=float, default=GRACE_S, help="seconds from SIGTERM to SIGKILL")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
