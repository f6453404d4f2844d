"""What tests of running processes share: the fake agent and rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.child_processes import until

FAKE_AGENT = str(Path(__file__).with_name("fake_agent.py"))
FAKE_CLI = str(Path(__file__).with_name("fake_cli.py"))
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


def read_pid(path: Path) -> int:
    """A process id that another process writes to a file."""
    until(lambda: path.exists() and path.read_text(), path.name)
    return int(path.read_text())
