"""Processes of the kit: one that is asked a question, or one a rank that runs checks.

A process of checks writes a line to its file of answers when a check begins and when it has its
answer. Where a check takes longer than it may, the process writes its stack to its log and ends. So
a check that hangs is named, and the answers before it stay.
"""

from __future__ import annotations

import faulthandler
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.testing.check import LIMIT_S, progress

BEGUN, LIMIT = "begun", "limit_s"
"""Fields of a line that says which check, or other step, has begun, and how long it may take."""
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
ANSWER = "anygauge answers: "
"""Begins the line with the answer of `answer_of`; libraries may print others."""


# -- one question ---------------------------------------------------------------------------------


def answer_of(
    arguments: Sequence[str],
    request: Any,
    environment: Mapping[str, str],
    what: str,
    limit_s: float = 120.0,
) -> Any:
    """What a Python process says in a line of `ANSWER` and JSON.

    Args:
        arguments: of Python, such as ``-m`` and a module.
        request: JSON for its standard input.
        what: is asked for, in words.

    Raises:
        AssertionError: it said nothing, or ended with another status than 0.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"asking for {what} had not ended after {limit_s:.0f} s") from None
    status = f"asking for {what} ended with status {done.returncode}: {last_lines(done.stderr)}"
    found = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    assert done.returncode == 0 and found, status
    return json.loads(found[-1].removeprefix(ANSWER))


def answer(found: Any) -> None:
    """Say it, as the process that `answer_of` has started."""
    print(f"\n{ANSWER}{json.dumps(found)}", flush=True)


def last_lines(text: str, count: int = 3) -> str:
    """The end of what a process wrote, on one line."""
    return " | ".join([line for line in text.splitlines() if line.strip()][-count:])


# -- the process that runs checks -----------------------------------------------------------------


class Answers:
    """Writes one process's file of answers, line by line, so that a crash keeps them.

    Args:
        limits: name of a check, or of another step -> seconds that it may take.
    """

    def __init__(self, path: Path, limits: Mapping[str, float]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._limits = {**STEPS_S, **limits}

    def begin(self, name: str) -> None:
        """A check, or one of `STEPS_S`, begins."""
        limit = self._limits.get(name, LIMIT_S)
        # A thread of C code, which ends also a process that never returns to Python.
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
        self._write({BEGUN: name, LIMIT: limit})

    def write(self, name: str, result: str, why: str) -> None:
        """A check has its verdict."""
        self._write({"name": name, "result": result, "why": why})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


# -- whoever waits for it -------------------------------------------------------------------------


def start(
    module: Sequence[str], request: Any, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Run a module of the kit with a request on its standard input."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(request).encode())
    return process


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
        name = begun(files[0]).get(BEGUN, shown)
        if name != shown:
            shown = name
            progress(f"{what}: {name}")
        if now > deadline:
            break
        time.sleep(POLL_S)
    troubles = []
    for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
        if rank in left:
            process.kill()
            process.wait()
            troubles.append((len(lines(file)), f"rank {rank} had not ended {why}"))
        elif status := process.poll():
            ended = _ending(file, status, rank, len(files) > 1)
            troubles.append((len(lines(file)), ended))
    return "; ".join(text for _, text in sorted(troubles))


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of answers; none where there is no such file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def begun(path: Path) -> dict[str, Any]:
    """`BEGUN` and `LIMIT` of the step that has begun last and not ended; empty if there is none."""
    found = lines(path)
    return found[-1] if found and BEGUN in found[-1] else {}


def _ending(answers: Path, status: int, rank: int, several: bool) -> str:
    """``broadcast had not ended after 60 s (in all_reduce, collectives.py:88)``, where a process
    has ended for that, or its status and the end of its log."""
    path = answers.with_suffix(".log")
    log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    _, *stack = TIMED_OUT.split(log)
    step = begun(answers)
    if not stack or not step:
        said = last_lines(log)
        return f"rank {rank} ended with status {status}" + (f": {said}" if said else "")
    # The main thread comes last. Of calls within torch, the one that led there says more.
    frames = FRAME.finditer(stack[-1].rpartition("Thread 0x")[2])
    own = next((each for each in frames if TORCH not in each["file"]), None)
    place = f" (in {own['function']}, {Path(own['file']).name}:{own['line']})" if own else ""
    who = f"rank {rank}: " if several else ""
    return f"{who}{step[BEGUN]} had not ended after {step[LIMIT]:.0f} s{place}"
