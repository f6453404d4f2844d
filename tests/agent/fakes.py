"""What tests of running processes share: the fake agent and rank, and how to wait for processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FAKE_AGENT = str(Path(__file__).with_name("fake_agent.py"))
FAKE_CLI = str(Path(__file__).with_name("fake_cli.py"))
PATIENCE_S = 60.0
FOREVER = ["sleep", 600]


def sends(event: str, **fields: Any) -> list[Any]:
    """The action by which a fake rank sends an event."""
    return ["send", {"event": event, **fields}]


FINISHED = sends("finished")


def write_script(folder: Path, ranks: Mapping[int, Sequence[Any]]) -> Path:
    """The file that tells fake ranks what to do."""
    script = folder / "script.json"
    script.write_text(json.dumps({str(rank): actions for rank, actions in ranks.items()}))
    return script


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def read_pid(path: Path) -> int:
    """A process id that another process writes to a file."""
    until(lambda: path.exists() and path.read_text(), path.name)
    return int(path.read_text())
