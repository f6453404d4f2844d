"""Processes of the kit: each calls one of its functions; how they begin, and how they end.

A process of checks writes a line to its file of answers when a check begins and when it has its
verdict. Where a check takes longer than it may, the process writes its stack to its log and ends.
So a check that hangs is named, and the answers before it stay.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.testing.check import LIMIT_S, Verdict, progress

MODULE = "anygauge.testing.watch"
BEGUN = "begun"
"""Stands for the verdict on what has begun, with how long it may take."""
OPENING, CLOSING, ENDING = "opening the device", "closing the device", "the process"
STEPS_S = {OPENING: 300.0, CLOSING: 60.0, ENDING: 60.0}
"""What else a process does, and the seconds that it may take."""
POLL_S = 0.05
ALONE_S = 30.0
"""Seconds that the other ranks get once one has ended."""
TIMED_OUT = re.compile(r"^Timeout \(\d.*\)!$", re.MULTILINE)
"""Begins the stack that `faulthandler` writes."""
FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
TORCH = "/torch/"


def start(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    file: Path,
) -> subprocess.Popen[bytes]:
    """Call a function of the kit in a process of its own, whose log is beside the file.

    Args:
        arguments: JSON.
        file: gets what the function returns, as JSON, unless that is None.
    """
    call = [function.__module__, function.__name__, arguments, str(file)]
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, json.dumps(call)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )


def answer_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    what: str,
    limit_s: float = 120.0,
) -> Any:
    """What a function returns in a process of its own; `what` says in words what that is.

    Raises:
        AssertionError: it ended otherwise, or not in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        trouble = run_to_end([start(function, arguments, environment, file)], [file], limit_s)
        assert not trouble and file.exists(), f"asking for {what}: {trouble or 'no answer'}"
        return json.loads(file.read_text(encoding="utf-8"))


class Answers:
    """Writes one process's file of answers, line by line, so that a crash keeps them.

    Args:
        limits: name of a check, or of another step -> seconds that it may take.
    """

    def __init__(self, path: Path, limits: Mapping[str, float]) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)  # writes each line at once
        self._limits = {**STEPS_S, **limits}

    def begin(self, name: str) -> None:
        """A check, or one of `STEPS_S`, begins."""
        limit = self._limits.get(name, LIMIT_S)
        # A thread of C code, which ends also a process that never returns to Python.
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
        self.write(name, BEGUN, f"{limit:.0f} s")

    def write(self, name: str, result: str, why: str) -> None:
        """A check has its verdict."""
        self._file.write(json.dumps([name, result, why]) + "\n")


def answers_in(path: Path) -> dict[str, Verdict]:
    """What has become of each check, or other step, in the order in which they began; of the last
    it may be `BEGUN`. Empty where there is no such file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return {name: (result, why) for name, result, why in map(json.loads, whole.splitlines())}


def run_to_end(
    processes: Sequence[Any], files: Sequence[Path], limit_s: float, *, what: str = ""
) -> str:
    """Wait until all processes have ended; end those that are left long after another.

    Args:
        processes: by rank, with `poll`, `kill` and `wait` of `subprocess.Popen`.
        files: of their answers; each may have its log beside it.
        limit_s: seconds that they may take in all.
        what: is asked, for `progress`.

    Returns:
        Which did not end in order, and why, in words, the one that came least far first; empty if
        all did.
    """
    deadline, why, shown = time.monotonic() + limit_s, f"after {limit_s:.0f} s", ""
    while left := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        now = time.monotonic()
        if len(left) < len(processes) and now + ALONE_S < deadline:
            deadline, why = now + ALONE_S, f"{ALONE_S:.0f} s after another"
        name = next(reversed(answers_in(files[0])), shown)
        if name != shown:
            shown = name
            progress(f"{what}: {name}")
        if now > deadline:
            break
        time.sleep(POLL_S)
    troubles = []
    for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
        who = f"rank {rank}" if len(files) > 1 else ""
        if rank in left:
            process.kill()
            process.wait()
            troubles.append((len(answers_in(file)), f"{who or ENDING} had not ended {why}"))
        elif status := process.poll():
            troubles.append((len(answers_in(file)), _ending(file, status, who)))
    return "; ".join(text for _, text in sorted(troubles))


def last_lines(text: str, count: int = 3) -> str:
    """The end of what a process wrote, on one line."""
    return " | ".join([line for line in text.splitlines() if line.strip()][-count:])


def _ending(answers: Path, status: int, who: str) -> str:
    """``broadcast had not ended after 60 s (in all_reduce, collectives.py:88)``, where a process
    has ended for that, or its status and the end of its log."""
    path = answers.with_suffix(".log")
    log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    _, *stack = TIMED_OUT.split(log)
    name, (result, limit) = next(reversed(answers_in(answers).items()), ("", ("", "")))
    if not stack or result != BEGUN:
        said = last_lines(log)
        return f"{who or ENDING} ended with status {status}" + (f": {said}" if said else "")
    # The main thread comes last. Of calls within torch, the one that led there says more.
    frames = FRAME.finditer(stack[-1].rpartition("Thread 0x")[2])
    own = next((each for each in frames if TORCH not in each["file"]), None)
    place = f" (in {own['function']}, {Path(own['file']).name}:{own['line']})" if own else ""
    return f"{f'{who}: ' if who else ''}{name} had not ended after {limit}{place}"


if __name__ == "__main__":
    _module, _name, _arguments, _file = json.loads(sys.argv[1])
    _found = getattr(importlib.import_module(_module), _name)(*_arguments)
    if _found is not None:
        Path(_file).write_text(json.dumps(_found), encoding="utf-8")
