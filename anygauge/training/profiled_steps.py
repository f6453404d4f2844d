"""Records some steps of a run, for ``--profile FROM:TO``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from anygauge.interface import PROFILE, Placement, UsageError
from anygauge.training.progress import Progress
from anygauge.util.text import describe


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfiler:
    """Passes the loop's steps through, and records some of them on the way.

    Attributes:
        steps: those that are recorded, from 0; empty: none.
        folder: of the run.
        log: gets a line of text and its level.
    """

    placement: Placement
    progress: Progress
    steps: range
    folder: Path
    rank: int
    log: Callable[[str, str], None]

    def check(self, start: int, end: int) -> None:
        """Check that some of the steps are trained: all from `start` on, but for `end`.

        Raises:
            UsageError: there would be nothing to record.
        """
        if self.steps and not range(max(start, self.steps[0]), min(end, self.steps.stop)):
            raise UsageError(
                f"--profile {self.steps[0] + 1}:{self.steps.stop}: this run would train none of "
                f"these steps; it trains steps {start + 1} to {end}. Name steps among them"
            )

    def over(self, indices: Iterable[int]) -> Iterator[int]:
        """The same indices. The recording begins before a step, and ends before the next one that
        is not recorded, or when the loop is left; so it includes an evaluation that comes between.
        """
        recording: contextlib.ExitStack | None = None
        try:
            for index in indices:
                if index in self.steps and recording is None:
                    recording = contextlib.ExitStack()
                    recording.enter_context(self._record())
                if index not in self.steps and recording is not None:
                    self._end(recording)
                    recording = None
                yield index
        finally:
            if recording is not None:
                self._end(recording)

    @contextlib.contextmanager
    def _record(self) -> Iterator[None]:
        home = self.folder / PROFILE / f"{self.steps[0] + 1}-{self.steps.stop}"
        own = home / f"rank{self.rank}"
        own.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as writing, self.placement.profile(own):
            yield
            writing.enter_context(self.progress.long_work("writing the profile"))
        if self.rank == 0:
            self.log(f"profile: {home}", "info")

    def _end(self, recording: contextlib.ExitStack) -> None:
        """What was recorded is written; a full disk must not end the run."""
        try:
            recording.close()
        except (OSError, RuntimeError) as error:
            self.log(
                f"the profile cannot be written: {describe(error)}. The run goes on", "warning"
            )
