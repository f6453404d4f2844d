"""Processes that a test starts: whatever happens, they end, and nothing waits for them for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

KILLED_S = 30.0
"""Seconds that a killed process may take until it is gone, and its pipes are closed."""
PATIENCE_S = 120.0
"""What is awaited comes sooner, on a loaded machine, too."""


def as_in_a_terminal() -> None:
    """For `preexec_fn`: ends what a child of a background job or of nohup ignores, as they do."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def begin(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    program: Sequence[object] = (sys.executable, "-m", "anygauge.cli"),
    **options: Any,
) -> subprocess.Popen[str]:
    """Start `anygauge` with these arguments, as from a terminal but without its input.

    Args:
        program: what to start in its place.
    """
    usual = {
        "env": {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        **{"text": True, "preexec_fn": as_in_a_terminal},
    }
    return subprocess.Popen([*map(str, (*program, *arguments))], **{**usual, **options})


def printed(
    code: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> list[str]:
    """The lines that Python code prints in a process of its own, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def begin_agents(
    job: Path, nodes: int, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start the agents of a job's nodes, which meet at a port of this machine."""
    program = (sys.executable, "-m", "anygauge.launch.agent", "--job", job)
    meet = ("--coordinator", f"127.0.0.1:{free_port()}")
    return [
        begin("--node-rank", node, *meet, program=program, environment=environment)
        for node in range(nodes)
    ]


def running(is_one: Callable[[Path], object]) -> list[int]:
    """Processes of this machine, by what is in their folders below /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdecimal() and is_one(entry):
                found.append(int(entry.name))
    return found


def end(*processes: subprocess.Popen[Any]) -> None:
    """Kill all that still run, read what is left of their output, and reap them."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.communicate(timeout=KILLED_S)


@contextlib.contextmanager
def bounded(process: subprocess.Popen[Any], within_s: float = 120.0) -> Iterator[None]:
    """For reading a process's output line by line: after so long it is killed, and the output ends.

    It is killed where the block fails, too.
    """
    timer = threading.Timer(within_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException:
        end(process)
        raise
    finally:
        timer.cancel()
