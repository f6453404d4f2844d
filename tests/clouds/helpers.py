"""What tests of the clouds' launchers share: a job, and a stand-in for a cloud's client."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import Job, LaunchProfile
from anygauge_clouds import service_job
from anygauge_clouds.service_job import Service
from tests.helpers.jobs import make_job

CARDS = LaunchProfile(
    image="vendor/stack:1",
    container_flags=("--ipc=host", "--cap-add=sys_nice", "--ulimit=memlock=-1"),
    cluster_resource="example.com/card",
    node_resources={"memory": "400Gi"},
)


def job(folder: Path | str = "/home/me/runs/Tiny_Run.1", **fields: Any) -> Job:
    """Two machines with eight cards each."""
    return make_job(
        **{
            "run_directory": folder, "run_file": f"{folder}/run.json", "backend": "cards",
            "nodes": 2, "devices": 8, "token": "the token", "port": 4711,
            "pass_environment": ("HF_HOME",), "run_text": "name: t\n",
            **fields,
        }
    )  # fmt: skip


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The options with some changed; None leaves one out."""
    return {key: value for key, value in {**base, **change}.items() if value is not None}


class Client:
    """A stand-in for a cluster's command-line client; it refuses commands that have no answer yet.

    It answers from a list of (words that a command must hold, exit status, output, errors); the
    first that fits is taken, and taken off unless it is the last of its kind.
    """

    # Without site-packages: it starts often.
    SCRIPT = """#!{python} -IS
import json, sys, time
from pathlib import Path
folder = Path({folder!r})
given = "" if "-" not in sys.argv[1:] else sys.stdin.read()
with (folder / "asked.jsonl").open("a") as file:
    file.write(json.dumps([sys.argv[1:], given]) + "\\n")
for word, seconds in json.loads((folder / "slow.json").read_text()).items():
    if word in sys.argv:
        time.sleep(seconds)
answers = json.loads((folder / "answers.json").read_text())
for number, (words, status, out, err) in enumerate(answers):
    if all(word in sys.argv for word in words):
        if any(words == other[0] for other in answers[number + 1:]):
            del answers[number]
            (folder / "answers.json").write_text(json.dumps(answers))
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(status)
sys.stderr.write(f"unexpected: {{sys.argv}}")
sys.exit(99)
"""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self._folder = folder / f"client-{name}"
        self._folder.mkdir()
        program = self._folder / name
        program.write_text(self.SCRIPT.format(python=python, folder=str(self._folder)))
        program.chmod(0o755)
        self.path = f"{self._folder}:{os.environ['PATH']}"
        self._answers: list[tuple[list[str], int, str, str]] = []
        (self._folder / "slow.json").write_text("{}")

    def answer(self, *words: str, out: Any = "", status: int = 0, err: str = "") -> None:
        """What it says to a command with these words."""
        text = out if isinstance(out, str) else json.dumps(out)
        self._answers.append(([*words], status, text, err))
        (self._folder / "answers.json").write_text(json.dumps(self._answers))

    def forget(self) -> None:
        """Answer nothing any more."""
        self._answers.clear()

    def slow(self, word: str, seconds: float) -> None:
        """Have it take its time over commands with a word."""
        (self._folder / "slow.json").write_text(json.dumps({word: seconds}))

    def has_asked(self, *words: str) -> bool:
        """Whether there was a command with these words."""
        if not (self._folder / "asked.jsonl").exists():
            return False
        return any(all(word in argv for word in words) for argv, _ in self.asked)

    @property
    def asked(self) -> list[tuple[list[str], str]]:
        """Commands so far, each with what it was given on standard input."""
        lines = (self._folder / "asked.jsonl").read_text().splitlines()
        return [(argv, given) for argv, given in map(json.loads, lines)]


def client_for(
    name: str, service: type[Service], folder: Path, patch: pytest.MonkeyPatch
) -> Client:
    """A client on the path, of a service that is asked often and believed soon."""
    client = Client(name, folder, sys.executable)
    patch.setenv("PATH", client.path)
    patch.setattr(service_job, "POLL_S", 0.05)
    patch.setattr(service, "log_delay_s", 0.3)
    return client


def events_text(*events: dict[str, Any]) -> str:
    """Events as an agent prints them."""
    return "".join(json.dumps(event) + "\n" for event in events)
