"""However a command ends, nothing that it started is left: real runs."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import STOPPED
from tests.helpers.child_processes import begin, running
from tests.helpers.faults import TOLD_TO_FAIL, keep
from tests.helpers.runs import run_file

MARK = "MARK_OF_THIS_TEST"
PATIENCE_S = 120.0
RANK = "anygauge.launch.rank"


class Command:
    """``anygauge train``; everything that it starts bears a mark."""

    def __init__(
        self, path: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, text = self._mark.split("=")
        self.folder = path.parent / "out" / "tiny"
        self.process = begin(
            *("train", path, *arguments),
            environment={**(environment or {}), name: text},
            start_new_session=True,
        )

    def left(self) -> dict[int, str]:
        """What bears the mark and still runs, a zombie has none: process id -> command line."""
        found = {}

        def is_one(entry: Path) -> None:
            if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")

        running(is_one)
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


WITHIN_AN_IMPORT = """
import os, signal, sys
from anygauge import cli

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            Dropped()

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.exit(cli.run(["train", "--help"]))
"""


def test_ctrl_c_where_python_drops_exceptions_ends_an_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHIN_AN_IMPORT], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


FAULTS: dict[str, tuple[str, int, int, str]] = {
    "worker exits, rank 0": ("rank0", signal.SIGRTMIN, 1, "rank 0 on .* failed with RuntimeError"),
    "worker exits, rank 1": ("rank1", signal.SIGRTMIN, 1, "rank 1 on .* failed with RuntimeError"),
    "worker killed, rank 0": ("rank0", signal.SIGKILL, 1, "rank 0 on .* was killed .signal 9"),
    "worker killed, rank 1": ("rank1", signal.SIGKILL, 1, "rank 1 on .* was killed .signal 9"),
    "command killed": ("command", signal.SIGKILL, -signal.SIGKILL, ""),
    "terminal closed": ("group", signal.SIGHUP, STOPPED, "stopped at request after step"),
    "SIGTERM": ("command", signal.SIGTERM, STOPPED, "stopped at request after step"),
    "Ctrl-C": ("group", signal.SIGINT, STOPPED, "stopped at request after step"),
}
"""What is hit, by which signal, the exit status, and what the command says on standard error."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.slow] * (f != "command killed")) for f in FAULTS],
)
def test_a_run_of_this_machine_ends_whole(
    fault: str, tmp_path: Path, commands: list[Command]
) -> None:
    """The same faults as in `tests.launchers.test_faults`, of a local run of two ranks."""
    what, signum, status, said = FAULTS[fault]
    (tmp_path / "sitecustomize.py").write_text(TOLD_TO_FAIL)
    path = run_file(tmp_path, train={"steps": 100_000}, checkpoint={"grace_s": 20})
    command = Command(path, "--devices", "2", environment={"PYTHONPATH": str(tmp_path)})
    commands.append(command)
    command.until(lambda: command.steps() >= 2, "steps")
    log = (command.folder / "logs" / "supervisor.log").read_text()
    ranks = [int(pid) for pid in re.findall(r"rank \d+ started, process (\d+)", log)]
    started = {pid for pid in command.left() if pid != command.process.pid}
    assert started == set(ranks), "the command and its ranks, and nobody else"
    if what == "group":
        os.killpg(command.process.pid, signum)
    else:
        victims = {"rank0": ranks[0], "rank1": ranks[1], "command": command.process.pid}
        os.kill(victims[what], signum)
    began = time.monotonic()
    command.until(lambda: not command.left(), "the end of all")
    took = round(time.monotonic() - began, 1)
    found, _, err = command.end()
    keep("local", fault, {"here": took}, err)
    assert found == status and re.search(said, err) and "Traceback" not in err, err
    if status == STOPPED:
        assert any((command.folder / "checkpoints").iterdir()), err
