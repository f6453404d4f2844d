"""Agents of one job on this machine, each as if on a machine of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.child_processes import PATIENCE_S, begin, free_port, until
from tests.helpers.jobs import make_job
from tests.launch.fakes import FAKE_AGENT, read_pid, write_script


class Cluster:
    """Agents of one job over fake ranks, each as if on a machine of its own.

    Attributes:
        events, err: what the agent of the last `end` reported, and wrote to standard error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.directory = folder / "run directory"
        self.job = self.directory / "job.json"
        self.script = ""

    def prepare(self, ranks: dict[int, list[Any]], nodes: int = 1, **options: Any) -> None:
        self.script = str(write_script(self.folder, ranks))
        self.directory.mkdir(exist_ok=True)
        job = make_job(
            run_directory=self.directory,
            nodes=nodes,
            devices=len(ranks) // nodes,
            **{"token": "of this job", "join_timeout_s": 30.0, "lost_after_s": 30.0, **options},
        )
        self.job.write_text(job.dump())

    def start(
        self, node: int = 0, *extra: str, key: int | None = None, grace: float = 0.5, **options: Any
    ) -> subprocess.Popen[str]:
        """Start an agent, with `options` of `begin`."""
        agent = self.agents[node if key is None else key] = begin(
            *("--job", self.job, "--node-rank", node, "--coordinator", f"127.0.0.1:{self.port}"),
            *("--grace", grace, *extra),
            program=(sys.executable, FAKE_AGENT, self.script),
            **options,
        )
        return agent

    def run(self, ranks: dict[int, list[Any]], nodes: int = 1, **options: Any) -> dict[str, Any]:
        """A whole job; the last event of the first agent."""
        self.begin(ranks, nodes, **options)
        return self.end()

    def begin(self, ranks: dict[int, list[Any]], nodes: int = 1, **options: Any) -> None:
        self.prepare(ranks, nodes, **options)
        for node in range(nodes):
            self.start(node)

    def end(self, key: int = 0) -> dict[str, Any]:
        """Wait for one agent; its last event."""
        out, self.err = self.agents[key].communicate(timeout=PATIENCE_S)
        self.events = [json.loads(line) for line in out.splitlines()]
        assert self.events and self.events[-1]["event"] == "ended", self.err
        assert self.events[-1]["exit_status"] == self.agents[key].returncode
        return self.events[-1]

    def started(self, *ranks: int) -> list[int]:
        return [read_pid(self.folder / f"pid{rank}") for rank in ranks]

    def wait(self, *names: str) -> None:
        """Until fake ranks have touched these files."""
        for name in names:
            until((self.folder / name).exists, name)

    def result(self, rank: int) -> dict[str, Any]:
        return json.loads((self.directory / "ranks" / f"rank{rank}.json").read_text())
