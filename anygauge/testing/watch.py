"""Processes of the kit: how they are asked, and how they are watched while they run checks.

A process writes a line to its file of answers when a check begins, and one when it ends; if a check
takes longer than it may, it writes where it hangs. Whoever waits for the processes reads both; so a
check that hangs is named, and the answers before it stay.
"""

from __future__ import annotations

import faulthandler
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anygauge.testing.check import LIMIT_S, Answer, progress

BEGUN, LIMIT = "begun", "limit_s"
"""Fields of a line that says which check, or other step, has begun, and how long it may take."""
OPENING, CLOSING, ENDING = "opening the device", "closing the device", "the process"
STEPS_S = {OPENING: 300.0, CLOSING: 60.0, ENDING: 60.0}
"""What else a process does, and the seconds that it may take."""
POLL_S = 0.05
GRACE_S = 2.0
"""Seconds that the others get to write where they are once one has written that it hangs."""
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
        # Kept open: the process may hang where it can open nothing.
        self._stack = stack_of(path).open("w", encoding="utf-8")
        self._limits = {**STEPS_S, **limits}

    def begin(self, name: str) -> None:
        """A check, or one of `STEPS_S`, begins."""
        limit = self._limits.get(name, LIMIT_S)
        faulthandler.dump_traceback_later(limit, file=self._stack)
        self._write({BEGUN: name, LIMIT: limit})

    def write(self, name: str, answer: Answer) -> None:
        """A check has its answer."""
        self._write({"name": name, **asdict(answer)})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def stack_of(answers: Path) -> Path:
    """The file to which the process of a file of answers writes where it hangs."""
    return answers.with_suffix(".stack")


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
    processes: Sequence[Any],
    files: Sequence[Path],
    limit_s: float,
    *,
    what: str = "",
    alone_s: float = math.inf,
) -> str:
    """Wait until all processes have ended, or one hangs; then end the others.

    Args:
        processes: by rank, with `poll`, `kill` and `wait` of `subprocess.Popen`.
        files: of their answers; each may have its log beside it.
        limit_s: seconds that they may take in all.
        what: is asked, for `progress`.
        alone_s: seconds that those left may take once one has ended.

    Returns:
        Which did not end in order, and why, in words; empty if all did.
    """
    deadline, why, shown = time.monotonic() + limit_s, f"{limit_s:.0f} s", ""
    while True:
        left = [rank for rank, process in enumerate(processes) if process.poll() is None]
        hung = [rank for rank in left if _hangs(files[rank])]
        now = time.monotonic()
        if hung:
            deadline = min(deadline, now + GRACE_S)
        elif len(left) < len(processes) and now + alone_s < deadline:
            deadline, why = now + alone_s, f"{alone_s:.0f} s without another"
        name = begun(files[0]).get(BEGUN, "")
        if name not in ("", shown):
            shown = name
            progress(f"{what}: {name}")
        if not left or now > deadline:
            break
        time.sleep(POLL_S)
    troubles = [where_it_hangs([files[rank] for rank in hung], files)] if hung else []
    if left and not hung:
        who = ", ".join(f"rank {rank}" for rank in left)
        troubles.append(f"{who} had not ended after {why}")
    for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
        if rank in left:
            process.kill()
            process.wait()
        elif status := process.poll():
            log = file.with_suffix(".log")
            said = f": {last_lines(log.read_text(errors='replace'))}" if log.exists() else ""
            troubles.append(f"rank {rank} ended with status {status}{said}")
    return "; ".join(troubles)


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


def _hangs(path: Path) -> bool:
    return stack_of(path).exists() and stack_of(path).stat().st_size > 0


def where_it_hangs(hung: Sequence[Path], files: Sequence[Path]) -> str:
    """``broadcast had not ended after 60 s (in all_reduce, collectives.py:88)``, with the rank if
    there are several.

    Args:
        hung: those of `files` whose processes have written a stack.
    """
    # The rank that has come least far keeps the others waiting.
    passed = {path: len(lines(path)) for path in hung}
    said = []
    for path in [path for path in hung if passed[path] == min(passed.values())]:
        who = f"rank {files.index(path)}: " if len(files) > 1 else ""
        step = begun(path)
        place = _place(stack_of(path).read_text(encoding="utf-8", errors="replace"))
        said.append(f"{who}{step.get(BEGUN)} had not ended after {step.get(LIMIT, 0):.0f} s{place}")
    return "; ".join(said)


def _place(stack: str) -> str:
    """`` (in all_reduce, collectives.py:88)``: where the main thread is, which comes last."""
    main = stack.rpartition("Thread 0x")[2]
    frames = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    # Of calls within torch, the one that led there says more.
    own = next((frame for frame in frames if TORCH not in frame), frames[0])
    file, _, place = own.removeprefix("File ").partition(", line ")
    line, _, function = place.partition(" in ")
    return f" (in {function}, {Path(file.strip(chr(34))).name}:{line})"
