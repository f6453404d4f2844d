"""A run that was refused for a declaration, made all the same: is the declaration true?

The core refuses before anything is tried. Here the job's agent starts ranks in whose processes the
capability is declared in full; all else is as in any run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge.interface import FULL, Job
from anygauge.testing.process import COLLECTIVE_TIMEOUT_S, Subject
from anygauge.util.files import write_text

TIMEOUT_S = 900.0


def losses_all_the_same(
    job_file: Path, capability: str, subject: Subject
) -> Sequence[float] | None:
    """The losses of every step of a job that was refused; None if it fails without the refusal.

    Args:
        job_file: as the launcher of the refused run wrote it.
        capability: what the job was refused for.
    """
    job = Job.load(job_file)
    folder = Path(job.run_directory)
    # A short limit: what is missing may well hang.
    again = replace(
        job,
        rendezvous=f"file://{folder / 'overruled.rendezvous'}",
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    write_text(folder / "overruled.json", again.dump(), 0o600)
    with (folder / "logs" / "overruled.log").open("wb") as log:
        try:
            done = subprocess.run(
                _argv("agent", capability, folder / "overruled.json"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=TIMEOUT_S,
                env={**os.environ, "OMP_NUM_THREADS": "1", **subject.environment},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
    if done.returncode:
        return None
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def _argv(what: str, capability: str, job_file: str | Path) -> Sequence[str]:
    return (
        *(sys.executable, "-m", "anygauge.testing.overruled", what, capability),
        *("--job", str(job_file)),
    )


# -- in the processes -----------------------------------------------------------------------------


def main(what: str, capability: str, arguments: Sequence[str]) -> int:
    """The agent of the job, or one of its ranks."""
    if what == "agent":
        from anygauge.agent.__main__ import main as agent

        return agent(arguments, rank_argv=_argv("rank", capability, arguments[-1]))
    from anygauge.training.worker import main as rank

    _overrule(capability)
    sys.argv[1:] = arguments
    return rank()


def _overrule(capability: str) -> None:
    from anygauge.registry import Registry

    create = Registry.create_backend

    def overruled(*arguments: Any) -> Any:
        backend: Any = create(*arguments)
        support = backend.support
        backend.support = lambda name: FULL if name == capability else support(name)
        return backend

    setattr(Registry, "create_backend", overruled)  # noqa: B010  (mypy takes no other form)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
