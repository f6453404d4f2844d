"""Agents of one job on this machine, each as if on a machine of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.agent.fakes import FAKE_AGENT, PATIENCE_S, read_pid, write_script
from tests.helpers.jobs import make_job
from tests.helpers.processes import as_in_a_terminal


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Cluster:
    """Agents of one job, each as if on a machine of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.job = folder / "run" / "job.json"

    def prepare(self, ranks: dict[int, list[Any]], nodes: int, **options: Any) -> None:
        self.script = write_script(self.folder, ranks)
        self.job.parent.mkdir(exist_ok=True)
        job = make_job(
            name="t",
            run_directory=str(self.job.parent),
            run_file=str(self.job.parent / "run.yaml"),
            backend="cpu",
            strategy="single",
            nodes=nodes,
            devices=len(ranks) // nodes,
            rendezvous="file:///nowhere",
            **{"token": "of this job", "join_timeout_s": 30.0, "lost_after_s": 30.0, **options},
        )
        self.job.write_text(job.dump())

    def start(self, node: int, *extra: str, key: int | None = None, **popen: Any) -> None:
        self.agents[node if key is None else key] = subprocess.Popen(
            [
                *(sys.executable, FAKE_AGENT, str(self.script), "--job", str(self.job)),
                *("--node-rank", str(node), "--coordinator", f"127.0.0.1:{self.port}"),
                *("--grace", "0.5", *extra),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **{"preexec_fn": as_in_a_terminal, **popen},
        )

    def run(self, ranks: dict[int, list[Any]], nodes: int = 2, **options: Any) -> None:
        self.prepare(ranks, nodes, **options)
        for node in range(nodes):
            self.start(node)

    def end(self, key: int = 0) -> dict[str, Any]:
        """Wait for one agent; its last event."""
        out, err = self.agents[key].communicate(timeout=PATIENCE_S)
        self.events = [json.loads(line) for line in out.splitlines()]
        assert self.events and self.events[-1]["event"] == "ended", err
        assert self.events[-1]["exit_status"] == self.agents[key].returncode
        return self.events[-1]

    def started(self, *ranks: int) -> list[int]:
        return [read_pid(self.folder / f"pid{rank}") for rank in ranks]
