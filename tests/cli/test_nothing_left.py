"""However a command ends, nothing that it started is left: real runs."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import STOPPED
from tests.helpers.processes import as_in_a_terminal
from tests.helpers.runs import run_file

MARK = "MARK_OF_THIS_TEST"
PATIENCE_S = 120.0
RANK, AGENT = "anygauge.training.worker", "anygauge.agent --job"


class Command:
    """``anygauge train``; everything that it starts bears a mark."""

    def __init__(self, path: Path, *arguments: str, **environment: str) -> None:
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, text = self._mark.split("=")
        self.folder = path.parent / "out" / "tiny"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "anygauge.cli", "train", str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=as_in_a_terminal,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, name: text},
        )

    def left(self) -> dict[int, str]:
        """What bears the mark and still runs: process id -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # A zombie has none.
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def of(self, what: str) -> list[int]:
        """Process ids of those whose command line has these words."""
        return [pid for pid, words in self.left().items() if what in words]

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.left()}"
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Exit status and what it printed; nothing is left of it."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        self.until(lambda: not self.left(), "the end of all")
        return self.process.returncode, out, err

    def steps(self) -> int:
        """So many are done."""
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        for pid in command.left():
            os.kill(pid, signal.SIGKILL)
        command.process.communicate()


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_command_that_ends_while_its_ranks_import_leaves_nothing(
    tmp_path: Path, commands: list[Command], signum: int, status: int
) -> None:
    command = Command(run_file(tmp_path), "--devices", "2")
    commands.append(command)
    command.until(lambda: len(command.of(RANK)) == 2, "the ranks")
    os.killpg(command.process.pid, signum)
    assert command.end()[0] == status


@pytest.mark.parametrize("what", ["command", AGENT])
def test_nothing_outlives_a_command_or_an_agent_that_is_killed(
    tmp_path: Path, commands: list[Command], what: str
) -> None:
    command = Command(run_file(tmp_path, train={"steps": 100_000}), "--devices", "2")
    commands.append(command)
    command.until(command.steps, "a step")
    assert len(command.of(RANK)) == 2, command.left()
    (agent,) = command.of(AGENT)
    os.kill(command.process.pid if what == "command" else agent, signal.SIGKILL)
    assert command.end()[0] != 0


@pytest.mark.slow
def test_ctrl_c_ends_ranks_in_order(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(run_file(tmp_path, train={"steps": 100_000}), "--devices", "2")
    commands.append(command)
    command.until(command.steps, "a step")
    os.killpg(command.process.pid, signal.SIGINT)
    status, _, err = command.end()
    assert status == STOPPED, err
    assert any((command.folder / "checkpoints").iterdir()), err
