"""Has runs rehearsed in a process of its own, whose imports and stand-ins are gone with it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from anygauge.config.resolved import run_json
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError
from anygauge.planning.memory import RunMemory, ranks_that_differ
from anygauge.planning.process import LIMIT_S, Rehearser
from anygauge.util import errors


class Planner:
    """Rehearses runs of one number of ranks, one after the other.

    Args:
        world_size: ranks of all its runs.
        environment: variables that its processes have in addition to this one's; they win.
        first: a process of that environment, which imports meanwhile; it is this one's from now on.
    """

    def __init__(
        self,
        world_size: int,
        environment: Mapping[str, str] | None = None,
        first: Rehearser | None = None,
    ) -> None:
        self.world_size = world_size
        self._environment = environment or {}
        self._first = first
        self._ranks: dict[tuple[int, bool], Rehearser] = {}
        self._asked: list[Rehearser] = []

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in (*self._ranks.values(), *([self._first] if self._first else ())):
            rank.end()

    def rehearse(self, run: RunFile, backend: str) -> RunMemory:
        """What a rank of a run holds at most.

        Raises:
            AnygaugeError: what the run's ranks would refuse, or what cannot be rehearsed.
        """
        self.ask(run, backend)
        return self.answer()

    def ask(self, run: RunFile, backend: str) -> None:
        """Have a run rehearsed meanwhile; `answer` tells what was found.

        Raises:
            AnygaugeError: a process has ended.
        """
        few_bits = run.has_few_bits
        self._asked = []
        for rank in ranks_that_differ(run, self.world_size):
            key = rank, few_bits
            if key not in self._ranks:
                self._ranks[key] = self._started(few_bits)
            question = {
                "run": run_json(run.model_copy(update={"environment": {}})),
                "backend": backend,
                "world_size": self.world_size,
                "rank": rank,
            }
            self._ranks[key].ask(json.dumps(question).encode() + b"\n")
            self._asked.append(self._ranks[key])

    def answer(self, limit_s: float = LIMIT_S) -> RunMemory:
        """What a rank of the run that was asked about holds at most.

        Raises:
            TooLongError: a rank's answer was not there within so many seconds.
            AnygaugeError: as `rehearse`.
        """
        answers = [rank.answer(limit_s) for rank in self._asked]
        for answer in answers:
            if answer["event"] == "refused":
                raise getattr(errors, answer["error"], AnygaugeError)(answer["message"])
        found = (RunMemory.of_record(answer["found"]) for answer in answers)
        return functools.reduce(RunMemory.with_other, found)

    def _started(self, few_bits: bool) -> Rehearser:
        if few_bits:
            return Rehearser(self._environment, ())
        first, self._first = self._first, None
        return first or Rehearser(self._environment)
