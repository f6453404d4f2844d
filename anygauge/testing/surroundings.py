"""The backend under test, and the environment that the kit's processes get on its behalf.

A process of its own makes it, as an agent does for its ranks: the backend's code is not to run, set
variables or crash in the author's pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anygauge.agent.environment import inspect_node
from anygauge.interface import AnygaugeError, LaunchSettings
from anygauge.registry import BLOCK_VARIABLE, Registry, applied, resolve_environment
from anygauge.testing.basic import JOB

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The backend under test.

    Attributes:
        name: as users write it after ``--backend``.
        options: the run file's ``backend_options``.
        environment: variables for every process.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def environments(
    part: str, subject: Subject, ranks: int, folder: Path
) -> tuple[Sequence[Mapping[str, str]], str]:
    """The whole environment of every rank, and why the backend's share is missing; empty if not.

    Args:
        folder: for the answer and a log.
    """
    base = {**os.environ, "OMP_NUM_THREADS": "1", **subject.environment}
    answer = folder / f"{part}{ranks}.environments.json"
    log = answer.with_suffix(".log")
    asked = {"part": part, "subject": asdict(subject), "ranks": ranks, "answer": str(answer)}
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "anygauge.testing.surroundings"],
                input=json.dumps(asked).encode(),
                stdout=output,
                stderr=output,
                env=base,
                timeout=TIMEOUT_S,
                check=False,
            )
            status = f"with status {done.returncode}: {last_lines(log)}"
        except subprocess.TimeoutExpired:
            status = f"not within {TIMEOUT_S:.0f} s"
    if answer.exists():
        found = json.loads(answer.read_text(encoding="utf-8"))
        return found["environments"], found["trouble"]
    trouble = f"asking for the environment ended {status}"
    return [{**base, **_identity(rank, ranks)} for rank in range(ranks)], trouble


def last_lines(log: Path) -> str:
    """The end of a log, on one line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


# -- in the process -------------------------------------------------------------------------------


def main() -> None:
    """Write every rank's environment to the file that the request names."""
    asked = json.load(sys.stdin)
    subject, ranks = Subject(**asked["subject"]), asked["ranks"]
    base = dict(os.environ)
    found = [base] * ranks
    trouble = ""
    try:
        registry = Registry.load(base)
        if asked["part"] == "basic":
            # It asks what announcing the backend imports; other plugins may import what they like.
            blocked = [base.get(BLOCK_VARIABLE, ""), *_others(registry, subject.name)]
            base[BLOCK_VARIABLE] = ",".join(filter(None, blocked))
        backend = registry.create_backend(subject.name, subject.options)
        node = inspect_node(backend=backend, environ=base)
        job = replace(
            JOB,
            backend=subject.name,
            backend_options=subject.options,
            launch=LaunchSettings(devices=ranks),
        )
        found = [
            applied(resolve_environment(registry, backend, job, node, rank, base), base)
            for rank in range(ranks)
        ]
    except AnygaugeError as error:
        trouble = f"there is no environment for it: {error}"
    record = {
        "environments": [{**each, **_identity(n, ranks)} for n, each in enumerate(found)],
        "trouble": trouble,
    }
    Path(asked["answer"]).write_text(json.dumps(record), encoding="utf-8")


def _identity(rank: int, ranks: int) -> dict[str, str]:
    """Who a rank is, in an agent's words."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in numbers.items()}


def _others(registry: Registry, backend: str) -> list[str]:
    """Names by which to block every plugin but the backend's own distribution and anygauge."""

    def plain(name: str) -> str:
        return name.lower().replace("_", "-").replace(".", "-")

    own = {registry.find_backend(backend).distribution, "anygauge"}
    found = [(plugin.distribution, plugin.entry_point) for plugin in registry.plugins]
    found += [(failure.distribution, failure.entry_point) for failure in registry.failures]
    kept = {plain(name) for names in found if names[0] in own for name in names}
    blocks = [
        # By either name: one that ours bears, too, would block ours.
        next((name for name in names if name and plain(name) not in kept), "")
        for names in found
        if names[0] not in own
    ]
    return sorted(set(filter(None, blocks)))


if __name__ == "__main__":
    main()
