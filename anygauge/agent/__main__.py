"""``python -m anygauge.agent``: the one process that every launcher starts on each node."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.agent.inherited import scrub
from anygauge.agent.outbox import Outbox
from anygauge.agent.supervisor import GRACE_S, Supervisor
from anygauge.interface import AnygaugeError, Job
from anygauge.interface.files import write_text
from anygauge.interface.processes import die_with_parent

if TYPE_CHECKING:
    from anygauge.registry import ResolvedSetting

RankEnvironment = Callable[[int], dict[str, str]]
"""Local rank -> the whole environment of that rank, but for its identity."""


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
    arguments = _parse(argv)
    outbox = Outbox(sys.stdout.fileno())
    try:
        job = Job.load(arguments.job)
        hostname = socket.gethostname()
        supervisor = Supervisor(
            job,
            node_rank=arguments.node_rank,
            hostname=hostname,
            rank_argv=rank_argv
            or (sys.executable, "-m", "anygauge.training.worker", "--job", arguments.job),
            rank_environment=rank_environment or backend_environment(job, arguments.node_rank),
            outbox=outbox,
            grace_s=arguments.grace,
        )
        status = supervisor.run()
    except AnygaugeError as error:
        print(error, file=sys.stderr)
        status = error.exit_status
        _report(outbox, arguments.node_rank, status, str(error))
    except Exception as error:
        traceback.print_exc()
        status = 1
        text = f"the agent of node {arguments.node_rank} failed: {type(error).__name__}: {error}"
        _report(outbox, arguments.node_rank, status, text)
    outbox.close()
    return status


def backend_environment(job: Job, node_rank: int) -> RankEnvironment:
    """The environment that the job's backend, site and run file ask for.

    Raises:
        PluginError: the backend cannot be found or made.
    """
    from anygauge.agent.node import inspect_node
    from anygauge.registry import Registry, applied, resolve_environment

    registry = Registry.load()
    backend = registry.create_backend(job.backend, job.backend_options)
    inherited = scrub(os.environ)
    node = inspect_node(rank=node_rank, backend=backend, environ=inherited)
    write_provenance(
        Path(job.run_directory) / f"environment-node{node_rank}.json",
        {
            rank: resolve_environment(registry, backend, job, node, rank, inherited)
            for rank in range(job.devices_per_node)
        },
    )

    def of_rank(local_rank: int) -> dict[str, str]:
        resolved = resolve_environment(registry, backend, job, node, local_rank, inherited)
        return applied(resolved, inherited)

    return of_rank


def write_provenance(path: Path, by_rank: Mapping[int, Sequence[ResolvedSetting]]) -> None:
    """Record what each local rank's environment was, why, and who won; secrets are hidden."""
    records = {str(rank): [one.record() for one in found] for rank, found in by_rank.items()}
    write_text(path, json.dumps(records, indent=2) + "\n")


def _report(outbox: Outbox, node_rank: int, status: int, text: str) -> None:
    outbox.send("ended", state="failed", exit_status=status, cause=text, node_rank=node_rank)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m anygauge.agent", description="Run the ranks of one node of a job."
    )
    parser.add_argument("--job", required=True, help="the job file")
    parser.add_argument("--node-rank", type=int, default=0, help="which machine this is, from 0")
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, help="seconds from SIGTERM to SIGKILL"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
