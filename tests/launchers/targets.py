"""The same job on every target: two emulated nodes, reached by ssh, Open MPI or Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child_processes import as_in_a_terminal
from tests.helpers.tiny_tokenizer import FIXTURES
from tests.launchers.emulated import LOGIN, Machines, SlurmCluster, SshServers, why_not

PROGRAMS = {
    "ssh": ("ssh", "sshd", "ssh-keygen"),
    "mpi": ("ssh", "sshd", "ssh-keygen", "mpirun"),
    "slurm": ("slurmctld", "slurmd", "sbatch", "munged"),
}
NODES = ("node1", "node2")


@dataclass(kw_only=True)
class LaunchTarget:
    """One target that is up.

    Attributes:
        options: what the launcher needs to know of it.
        environment: what the login shell needs to know of it.
    """

    name: str
    machines: Machines
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    power_on: Any = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def launch(self, nodes: int = 2, **more: Any) -> dict[str, Any]:
        """The run file's section ``launch``."""
        passed = ["PATH", "OMP_NUM_THREADS", "PYTHONPATH"]
        section = {"launcher": self.name, "nodes": nodes, "devices": 1, "pass_environment": passed}
        return {**section, "options": dict(self.options), **more}

    def start(self, *argv: object, cwd: Path | None = None) -> subprocess.Popen[str]:
        """A command on the login machine; it leads a session of its own, as in a terminal."""
        process = subprocess.Popen(
            self.machines.command(LOGIN, argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=as_in_a_terminal,
            cwd=cwd,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(self.machines.folder),
                **self.environment,
            },
        )
        self.started.append(process)
        return process

    def train(self, path: Path, *options: str) -> subprocess.Popen[str]:
        """``anygauge train`` on the login machine."""
        return self.start(sys.executable, "-m", "anygauge.cli", "train", path, *options)

    def of_job(self) -> dict[str, dict[int, str]]:
        """Agents and ranks, machine by machine."""
        return {name: self.machines.of_job(name) for name in (*NODES, LOGIN)}

    def tidy(self) -> None:
        """End what a failed test has left."""
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        self.started.clear()
        for found in self.of_job().values():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def reason(name: str) -> str | None:
    """Why a target cannot be emulated here, or None."""
    return why_not(*PROGRAMS[name])


@contextlib.contextmanager
def target(name: str, folder: Path) -> Iterator[LaunchTarget]:
    """Bring a target up, and down again."""
    with Machines(folder) as machines:
        if name == "slurm":
            with SlurmCluster(machines, folder / "slurm") as slurm:
                made = LaunchTarget(
                    name=name,
                    machines=machines,
                    options={},
                    environment=slurm.environment,
                    power_on=slurm.boot,
                )
                yield made
                made.tidy()
            return
        ssh = SshServers(machines, folder / "ssh")
        options: dict[str, Any] = {"hosts": list(NODES), "config": str(ssh.config)}
        if name == "mpi":
            options["interface"] = "eth0"
        made = LaunchTarget(name=name, machines=machines, options=options, power_on=ssh.start)
        yield made
        made.tidy()


def brought_up(request: pytest.FixtureRequest, folder: Path) -> Iterator[LaunchTarget]:
    """The body of a fixture over all targets; skips where one cannot be emulated."""
    why = reason(request.param)
    if why is not None:
        pytest.skip(why)
    with target(request.param, folder) as made:
        yield made


def losses(folder: Path) -> list[float]:
    """Of the steps that a run has done."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def gsm8k(folder: Path, at: Path | None = None) -> dict[str, Any]:
    """The run file's data: real rows where there are some, otherwise the fixture's.

    Args:
        at: where machines have the folder, if that is elsewhere.
    """
    data, rows = os.environ.get("ANYGAUGE_DATA"), folder / "rows.jsonl"
    train = {"path": str((at or folder) / rows.name)}
    if data is None:
        shutil.copy(FIXTURES / rows.name, rows)
        return {"train": train}
    lines = (Path(data) / "gsm8k_train.jsonl").read_text().splitlines()[:64]
    rows.write_text("\n".join(lines) + "\n")
    return {"train": {**train, "prompt": "question", "completion": "answer"}, "max_length": 256}
