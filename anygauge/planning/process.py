"""The process that plans: one child that has torch, asked in JSON, and gone with the command.

Imports next to nothing: it is started before the run file is read.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from anygauge.util import errors
from anygauge.util.errors import AnygaugeError
from anygauge.util.processes import describe_exit, parent_environment

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.planning.memory import RunMemory

LIMIT_S = 600.0
"""A plan that takes longer counts as hung."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "OMP_NUM_THREADS": "1",
}
_TAIL = 2000

_started: list[Planner] = []


def start_planner() -> None:
    """Have a process import meanwhile, which `planner_for` gives."""
    _started.append(Planner())


def planner_for(environment: Mapping[str, str]) -> Planner:
    """The process that `start_planner` has started, or one with the variables of a run."""
    if _started and not environment:
        return _started.pop()
    end_started()
    return Planner(environment)


def end_started() -> None:
    """End the process that `start_planner` has started and nobody has taken."""
    while _started:
        _started.pop().end()


class TooLongError(AnygaugeError):
    """A plan was not made within its time."""


class Planner:
    """A process that plans runs, one after the other; see `anygauge.planning.plan`.

    Args:
        environment: variables that it has in addition to this process's; these win.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "anygauge.planning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env={**(environment or {}), **os.environ, **ENVIRONMENT, **parent_environment()},
        )
        self._asked: deque[bytes] = deque()
        self.end = weakref.finalize(self, _end, self._process, self._printed)

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def ask(self, run: RunFile, backend: str, world_size: int) -> None:
        """Have a run planned meanwhile: `plan` of the same run then waits for its rest alone.

        Raises:
            AnygaugeError: the process has ended.
        """
        self._ask(_question(run, backend, world_size))

    def plan(
        self, run: RunFile, backend: str, world_size: int, limit_s: float = LIMIT_S
    ) -> RunMemory:
        """What a run takes of its ranks, and what its steps compute.

        Args:
            backend: its name.

        Raises:
            TooLongError: there was no answer within so many seconds.
            AnygaugeError: what the run's ranks would refuse, or what cannot be planned; or the
                process has ended.
        """
        from anygauge.planning.memory import RunMemory

        question = _question(run, backend, world_size)
        if question not in self._asked:
            self._ask(question)
        answer = self._answer(limit_s)
        while self._asked.popleft() != question:
            answer = self._answer(limit_s)
        if answer["event"] == "refused":
            raise getattr(errors, answer["error"], AnygaugeError)(answer["message"])
        return RunMemory.of_record(answer["found"])

    def _ask(self, question: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._broken() from None
        self._asked.append(question)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], limit_s)[0]:
            raise TooLongError(
                f"no plan of this run was made within {limit_s:.0f} s; plan with fewer layers or a "
                "smaller data.max_length"
            )
        answer = stdout.readline()
        if not answer:
            raise self._broken()
        return dict(json.loads(answer))

    def _broken(self) -> AnygaugeError:
        code = self._process.wait()
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _TAIL))
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        return AnygaugeError(
            f"the process that plans ended with {describe_exit(code)}{last}. There may be too "
            "little memory; a smaller data.max_length or train.micro_batch_size needs less"
        )


def _question(run: RunFile, backend: str, world_size: int) -> bytes:
    from anygauge.config.resolved import run_json

    text = run_json(run.model_copy(update={"environment": {}}))
    return json.dumps({"run": text, "backend": backend, "world_size": world_size}).encode() + b"\n"


def _end(process: subprocess.Popen[bytes], printed: IO[bytes]) -> None:
    process.kill()
    process.communicate()
    printed.close()
