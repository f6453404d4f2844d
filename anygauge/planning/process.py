"""The process that rehearses runs: started, asked, and ended. Imports next to nothing."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from anygauge.util.errors import AnygaugeError
from anygauge.util.processes import describe_exit, parent_environment

LIMIT_S = 600.0
"""A rehearsal that takes longer counts as hung."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "OMP_NUM_THREADS": "1",
}
FEW_BITS = "bitsandbytes"
USUALLY_HIDDEN = (FEW_BITS,)
_TAIL = 2000


_begun: list[Rehearser] = []


def begin() -> None:
    """Have a process import meanwhile, which `begun` gives."""
    _begun.append(Rehearser())


def begun() -> Rehearser | None:
    """The process that `begin` has started, once."""
    return _begun.pop() if _begun else None


def end_begun() -> None:
    """End the process that `begin` has started and nobody has taken."""
    while _begun:
        _begun.pop().end()


class TooLongError(AnygaugeError):
    """A rehearsal has not ended within its time."""


class Rehearser:
    """A process that imports what a rehearsal needs, and waits for questions.

    Args:
        environment: variables that it has in addition to this process's; they win.
        hidden: packages that are not there for it, whose import takes longer than a rehearsal.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        hidden: Sequence[str] = USUALLY_HIDDEN,
    ) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "anygauge.planning", *hidden],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**(environment or {}), **os.environ, **ENVIRONMENT, **parent_environment()},
        )
        self.end = weakref.finalize(self, _end, self._process, self._said)

    def ask(self, line: bytes) -> None:
        """Have it begin.

        Raises:
            AnygaugeError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._broken() from None

    def answer(self, limit_s: float) -> dict[str, Any]:
        """What it found.

        Raises:
            TooLongError: it was not there within so many seconds.
            AnygaugeError: it has ended.
        """
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], limit_s)[0]:
            raise TooLongError(
                f"the rehearsal of this run has taken longer than {limit_s:.0f} s; plan with fewer "
                "layers or a smaller data.max_length"
            )
        answer = stdout.readline()
        if not answer:
            raise self._broken()
        return dict(json.loads(answer))

    def _broken(self) -> AnygaugeError:
        code = self._process.wait()
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _TAIL))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        return AnygaugeError(f"the rehearsal ended with {describe_exit(code)}{last}")


def _end(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    process.kill()
    process.communicate()
    said.close()
