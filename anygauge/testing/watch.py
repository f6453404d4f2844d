"""Watches a part's processes: which check has begun there, and which takes longer than it may.

A process writes a line to its file of answers when a check begins, and one when it ends. Whoever
waits for the processes reads them; so a check that hangs is named, and the answers before it stay.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from anygauge.testing.check import LIMIT_S, Answer, progress

BEGUN = "begun"
"""Field of a line that says which check, or other step, has begun."""
OPENING, CLOSING, ENDING = "opening the device", "closing the device", "the process"
STEPS_S = {OPENING: 300.0, CLOSING: 60.0, ENDING: 60.0}
"""What else a process does, and the seconds that it may take."""
POLL_S = 0.05
STACK_S = 2.0
"""Seconds that a process gets to write where it hangs."""
TORCH = "/torch/"
STACK_SIGNAL = signal.SIGUSR2


class Answers:
    """Writes one process's file of answers, line by line, so that a crash keeps them."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        # Kept open: the process may hang where it can open nothing.
        self._stack = stack_of(path).open("w", encoding="utf-8")
        faulthandler.register(STACK_SIGNAL, file=self._stack, all_threads=False)

    def begin(self, name: str) -> None:
        """A check, or one of `STEPS_S`, begins."""
        self._write({BEGUN: name})

    def write(self, name: str, answer: Answer) -> None:
        """A check has its answer."""
        self._write({"name": name, **answer.record()})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def stack_of(answers: Path) -> Path:
    """The file to which the process of a file of answers writes where it is."""
    return answers.with_suffix(".stack")


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of answers; none where there is no such file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def begun(path: Path) -> str:
    """The step that has begun last and not ended; empty if there is none."""
    found = lines(path)
    return found[-1].get(BEGUN, "") if found else ""


class ProcessWatch:
    """Watches several processes.

    Args:
        files: of answers, by rank.
        what: is asked, for `progress`.
        processes: their numbers, by rank.
        limits: name of a check -> seconds, where it is not `LIMIT_S`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        processes: Sequence[int],
        limits: Mapping[str, float],
        what: str = "",
    ) -> None:
        self._files = files
        self._processes = processes
        self._limits = {**STEPS_S, **limits}
        self._since: dict[int, tuple[int, float]] = {}
        self._what, self._shown = what, ""

    def overdue(self, ranks: Iterable[int]) -> str:
        """What hangs, in words; empty if nothing does.

        Args:
            ranks: those that still run.
        """
        now = time.monotonic()
        late = {}
        for rank in ranks:
            size = self._files[rank].stat().st_size if self._files[rank].exists() else 0
            if size != self._since.setdefault(rank, (size, now))[0]:
                self._since[rank] = (size, now)
            name = begun(self._files[rank])
            if rank == 0 and name not in ("", self._shown):
                self._shown = name
                progress(f"{self._what}: {name}")
            limit = self._limits.get(name, LIMIT_S)
            if name and now - self._since[rank][1] > limit:
                late[rank] = name, limit
        return self._words(late) if late else ""

    def _words(self, late: Mapping[int, tuple[str, float]]) -> str:
        # The rank that has come least far keeps the others waiting.
        passed = {rank: len(lines(self._files[rank])) for rank in late}
        least = min(passed.values())
        said = []
        for rank in [rank for rank in late if passed[rank] == least]:
            name, limit = late[rank]
            who = f"rank {rank}: " if len(self._files) > 1 else ""
            place = where(self._processes[rank], self._files[rank])
            said.append(f"{who}{name} had not ended after {limit:.0f} s{place}")
        return "; ".join(said)

    def broken(self, trouble: str) -> dict[str, Answer]:
        """For each check that some rank has begun and not ended: that it failed, and why."""
        names = {begun(path) for path in self._files} - {"", *STEPS_S}
        return {name: Answer(holds=False, detail=trouble) for name in names}


def where(process: int, answers: Path) -> str:
    """Ask a process that hangs where it is: `` (all_reduce, collectives.py:88)``; empty if it does
    not say."""
    path = stack_of(answers)
    if not path.exists():
        return ""
    os.kill(process, STACK_SIGNAL)
    until = time.monotonic() + STACK_S
    before: list[str] = []
    while time.monotonic() < until:
        found = path.read_text(encoding="utf-8", errors="replace").splitlines()
        frames = [line.strip() for line in found if line.strip().startswith("File ")]
        if frames and frames == before:
            # Of calls within torch, the one that led there says more.
            own = next((frame for frame in frames if TORCH not in frame), frames[0])
            file, _, place = own.removeprefix("File ").partition(", line ")
            line, _, function = place.partition(" in ")
            return f" (in {function}, {Path(file.strip(chr(34))).name}:{line})"
        before = frames
        time.sleep(POLL_S)
    return ""


def wait(
    running: Mapping[int, Callable[[], int | None]], watch: ProcessWatch, limit_s: float
) -> tuple[dict[int, int], str]:
    """Wait until all processes have ended, or one hangs.

    Args:
        running: by rank: gives the exit status, None while it runs.
        limit_s: seconds that they may take in all.

    Returns:
        Status by rank of those that have ended; what hangs, in words, empty if nothing does.
    """
    deadline = time.monotonic() + limit_s
    ended: dict[int, int] = {}
    while True:
        for rank in running.keys() - ended.keys():
            status = running[rank]()
            if status is not None:
                ended[rank] = status
        left = sorted(running.keys() - ended.keys())
        if not left:
            return ended, ""
        late = watch.overdue(left)
        if late:
            return ended, late
        if time.monotonic() > deadline:
            who = ", ".join(f"rank {rank}" for rank in left)
            return ended, f"{who} had not ended after {limit_s:.0f} s"
        time.sleep(POLL_S)
