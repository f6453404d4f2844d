"""``python -m anygauge.agent``: the one process that every launcher starts on each node."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge.agent.delivery import bring_run_file, claim, read_secrets
from anygauge.agent.fetching import OrderedError, fetch_on_all
from anygauge.agent.identity import read_coordinator, read_number, read_variables
from anygauge.agent.inherited import scrub
from anygauge.agent.nodes import EndedError, Hello, Nodes, Order
from anygauge.agent.outbox import Outbox
from anygauge.agent.outcome import JobFailure, Report
from anygauge.agent.parent import end_parent, obey_standard_input
from anygauge.agent.supervisor import GRACE_S, Supervisor
from anygauge.agent.wakeup import collect
from anygauge.interface import LOST, AnygaugeError, Job
from anygauge.util.processes import die_with_parent, tie_to_parent
from anygauge.util.rendezvous import file_of

RankEnvironment = Callable[[int], dict[str, str]]
"""Local rank -> the whole environment of that rank, but for its identity."""

_REPORTING_S = 30.0
_CAUSE_SIZE = 4000


def main(
    argv: Sequence[str] | None = None,
    *,
    rank_argv: Sequence[str] | None = None,
    rank_environment: RankEnvironment | None = None,
) -> int:
    """Run the ranks of one node.

    Args:
        argv: command line; None for this process's own.
        rank_argv: what to start as a rank instead of the training worker.
        rank_environment: where a rank's environment comes from instead of the job's backend.

    Returns:
        The exit status of this node's part of the job.
    """
    # SIGTERM rather than SIGKILL: the agent has ranks to end in order.
    die_with_parent(signal.SIGTERM)
    argv = sys.argv[1:] if argv is None else list(argv)
    outbox = Outbox(sys.stdout.fileno())
    nodes: Nodes | None = None
    arguments: argparse.Namespace | None = None
    node_rank, host = -1, socket.gethostname()
    # From the first moment, and between two attempts: the first process of a container does not
    # even get signals that it does not handle.
    asked: list[tuple[int, float]] = []
    collect(asked)
    try:
        if "--stdin" in argv:
            argv += obey_standard_input()
        arguments = _parse(argv)
        if arguments.tied:
            tie_to_parent(signal.SIGTERM)
        if arguments.variables is not None:
            os.environ.update(read_variables(arguments.variables))
        if arguments.secrets is not None:
            os.environ.update(read_secrets(arguments.secrets))
        inherited = scrub(os.environ)
        node_rank = read_number(arguments.node_rank, os.environ, "the number of this node")
        if arguments.events is not None:
            mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            outbox = Outbox(os.open(arguments.events, mode, 0o644), shared=True)
        again = read_number(arguments.attempt, os.environ, "the attempt", absent=0) > 0
        job = Job.load(arguments.job)
        if job.run_text:
            claim(job, node_rank)
            again = True
        if job.launch.nodes > 1:
            _keep_log(job.start_directory / "logs" / f"agent{node_rank}.log")
        if job.working_directory:
            os.chdir(job.working_directory)
        settings: dict[str, str] = {}
        network = fabric = ""
        cores: dict[int, tuple[int, ...]] = {}
        if rank_environment is None:
            from anygauge.agent.environment import (
                NodeEnvironment,
                provenance_file,
                write_provenance,
            )

            own = NodeEnvironment(job, node_rank, inherited)
            write_provenance(provenance_file(job, node_rank), own.record())
            settings, rank_environment, cores = own.digests(), own.of_rank, own.cores
            fabric = own.fabric.name
            network = f"network between machines: {own.fabric.name or 'any'} ({own.fabric.why})"
        nodes = meet(
            job, outbox, node_rank, host, arguments.coordinator, settings, asked, fabric=fabric
        )
        if job.run_text:
            bring_run_file(job)
        if network and node_rank == 0 and job.launch.nodes > 1:
            nodes.send("message", level="info", text=network)
        if job.fetch:
            fetch_on_all(job, nodes, rank_environment(0), host, asked)
        while True:
            meeting = file_of(nodes.rendezvous)
            if meeting is not None:
                # Ranks of an attempt that was killed have left their keys there.
                Path(meeting).unlink(missing_ok=True)
            status = Supervisor(
                replace(job, rendezvous=nodes.rendezvous),
                node_rank=node_rank,
                hostname=host,
                rank_argv=rank_argv or worker_argv(arguments.job, nodes, again=again),
                rank_environment=rank_environment,
                nodes=nodes,
                grace_s=arguments.grace,
                cores=cores,
                asked=asked,
            ).run()
            if nodes.outcome is None or nodes.outcome.state != "again":
                break
            if node_rank == 0:
                nodes.send("message", level="warning", text=_once_more(job, nodes))
            nodes.begin_again()
            again = True
    except OrderedError as error:
        assert nodes is not None
        print(error, file=sys.stderr)
        status = _report(outbox, nodes, node_rank, host, error.exit_status, "")
    except (AnygaugeError, OSError) as error:
        status = error.exit_status if isinstance(error, AnygaugeError) else 1
        print(error, file=sys.stderr)
        _report(outbox, nodes, node_rank, host, status, str(error))
    except Exception as error:
        traceback.print_exc()
        status = 1
        text = f"the agent of node {node_rank} failed: {type(error).__name__}: {error}"
        _report(outbox, nodes, node_rank, host, status, text)
    if nodes is not None:
        nodes.close()
    outbox.close()
    if arguments is not None and arguments.cause_file is not None and status:
        _leave_cause(Path(arguments.cause_file), outbox.last)
    if status == LOST and arguments is not None and arguments.parent_too:
        end_parent()
    return status


def worker_argv(job_file: str, nodes: Nodes, *, again: bool) -> tuple[str, ...]:
    """The command of a rank.

    Args:
        again: it goes on from the newest checkpoint.
    """
    return (
        *(sys.executable, "-m", "anygauge.training.worker", "--job", job_file),
        *("--rendezvous", nodes.rendezvous, *(("--resume",) if again else ())),
    )


def _once_more(job: Job, nodes: Nodes) -> str:
    assert nodes.outcome is not None
    return (
        f"{nodes.outcome.cause}\nstarting again from the newest checkpoint (restart "
        f"{nodes.restarts + 1} of {job.launch.max_restarts}, launch.max_restarts)"
    )


def meet(
    job: Job,
    outbox: Outbox,
    node_rank: int,
    host: str,
    coordinator: str,
    settings: dict[str, str],
    asked: Sequence[object] = (),
    *,
    fabric: str = "",
) -> Nodes:
    """Find the job's other nodes.

    Args:
        coordinator: ``host:port`` of node 0's agent, or ``$NAME:port``.
        settings: digest of each variable that must be the same on every node.
        asked: fills when this agent is asked to end.
        fabric: network between machines that this node would use.

    Raises:
        AnygaugeError: they cannot be found, or do not belong together.
    """
    if job.launch.nodes == 1:
        return Nodes(job, outbox)
    from importlib.metadata import version

    from anygauge.agent.coordinator import Coordinator
    from anygauge.agent.worker_node import WorkerNode

    own = Hello(
        node_rank=node_rank,
        host=host,
        nodes=job.launch.nodes,
        devices_per_node=job.launch.devices,
        version=version("anygauge"),
        fabric=fabric,
        settings=settings,
    )
    if not job.token:
        raise AnygaugeError(
            "the job file has no token, by which the nodes know each other: it was written to be "
            "read. anygauge train and anygauge launch draw one when they submit the job; for one "
            "that is submitted by hand, put a long random text into its field token"
        )
    address = read_coordinator(coordinator, os.environ)
    if not 0 <= node_rank < job.launch.nodes:
        raise AnygaugeError(
            f"{host} was started as node {node_rank}; the job has nodes 0 to {job.launch.nodes - 1}"
        )
    return (
        Coordinator(job, outbox, own, address, asked)
        if node_rank == 0
        else WorkerNode(job, outbox, own, address, asked)
    )


def _report(
    outbox: Outbox, nodes: Nodes | None, node_rank: int, host: str, status: int, text: str
) -> int:
    """Tell the follower, and the other nodes if they were met, why this agent ends.

    Args:
        text: the cause; empty where another node has it.

    Returns:
        The exit status: what all nodes agree on, where the cause is another's.
    """
    if nodes is None or nodes.over:
        state = "cancelled" if status == EndedError.exit_status else "failed"
        outbox.send("ended", state=state, exit_status=status, cause=text, node_rank=node_rank)
        return status
    failure = JobFailure(time=time.time(), text=text, exit_status=status, final=True)
    nodes.tell(Order.END)
    nodes.report(Report(node_rank=node_rank, host=host, failures=(failure,) if text else ()))
    deadline = time.monotonic() + _REPORTING_S
    while not nodes.over and time.monotonic() < deadline:
        nodes.turn()
        time.sleep(0.05)
    state = "failed"
    if not text and nodes.outcome is not None:
        state, status = nodes.outcome.state, nodes.outcome.exit_status
        text = nodes.outcome.cause or ""
    nodes.send("ended", state=state, exit_status=status, cause=text, node_rank=node_rank)
    return status


def _leave_cause(path: Path, last: dict[str, Any]) -> None:
    """Where a cluster looks for it. Its beginning matters: clusters keep no more than so much."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(last.get("cause") or "the agent ended without a cause")[:_CAUSE_SIZE])


def _keep_log(path: Path) -> None:
    """Have this process's standard error go to a file that stays with the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
    except OSError as error:
        raise AnygaugeError(
            f"{path} cannot be written on {socket.gethostname()}: {error.strerror}. The folder of "
            "a run must be on storage that all its nodes share (--output)"
        ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m anygauge.agent", description="Run the ranks of one node of a job."
    )
    parser.add_argument("--job", required=True, help="the job file")
    parser.add_argument(
        "--node-rank", default="0", help="which machine this is, from 0; or $NAME of a variable"
    )
    parser.add_argument(
        "--coordinator",
        default="",
        help="host:port of node 0; or $NAME:port, with NAME of a variable",
    )
    parser.add_argument(
        "--stdin",
        action="store_true",
        help="read further arguments and variables from standard input, and end with it",
    )
    parser.add_argument("--events", help="a file for events, instead of standard output")
    parser.add_argument("--variables", help="a JSON file of variables: name -> value")
    parser.add_argument("--secrets", help="a folder with a file for each of more variables")
    parser.add_argument("--cause-file", help="where to write why the job failed")
    parser.add_argument(
        "--attempt", default="0", help="above 0: resume from a checkpoint; or $NAME of a variable"
    )
    parser.add_argument(
        "--tied", action="store_true", help="end with the process that started this one"
    )
    parser.add_argument(
        "--parent-too",
        action="store_true",
        help="when a node is lost, end the process that started this one: a daemon of this job "
        "that would wait for the rest of it",
    )
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, help="seconds from SIGTERM to SIGKILL"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
