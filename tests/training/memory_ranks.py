"""Forked ranks that write the peak of their device's memory in each phase of a run.

Each rank writes ``phases{rank}.json``, phase -> bytes of the device's allocator, into the run's
folder. Each phase begins a new peak with what is held then.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import forked

TRAINING, EVALUATION, SAVE = "training", "evaluation", "save"
PEAKS: dict[str, int] = {}


@contextlib.contextmanager
def within(phase: str, before: str | None, placement: Any) -> Iterator[None]:
    """A phase, within another one or not."""

    def see(name: str) -> None:
        PEAKS[name] = max(placement.memory().peak, PEAKS.get(name, 0))
        placement.reset_peak()

    if before is not None:
        see(before)
    placement.reset_peak()
    try:
        yield
    finally:
        see(phase)


def running(run: Any) -> Any:
    def call(self: Any) -> Any:
        assert self.backend.placement.memory().kind == "allocator"
        with within(TRAINING, None, self.backend.placement):
            return run(self)

    return call


def evaluating(evaluate: Any) -> Any:
    def call(self: Any, done: int) -> Any:
        with within(EVALUATION, TRAINING, self.backend.placement):
            return evaluate(self, done)

    return call


def saving(save: Any) -> Any:
    def call(job: Any, rank: Any, prepared: Any) -> Any:
        with within(SAVE, None, prepared.loop.backend.placement):
            found = save(job, rank, prepared)
        file = Path(job.run_directory) / f"phases{os.environ['RANK']}.json"
        file.write_text(json.dumps(PEAKS))
        return found

    return call


if __name__ == "__main__":
    from anygauge.training import save
    from anygauge.training.loop import Loop

    with (
        mock.patch.object(Loop, "run", running(Loop.run)),
        mock.patch.object(Loop, "evaluate", evaluating(Loop.evaluate)),
        mock.patch.object(save, "save", saving(save.save)),
    ):
        forked.main()
