"""Runs rehearsed and held against machines, each once: what every further answer is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.data.batches import accumulation
from anygauge.interface import AnygaugeError, Card, RunFileError
from anygauge.planning.fit import Fit, fit, on_disk
from anygauge.planning.machines import Machine
from anygauge.planning.memory import RunMemory, stages_of
from anygauge.planning.planner import Planner
from anygauge.planning.process import Rehearser
from anygauge.planning.time import Duration, Ranks, UnknownRateError, duration
from anygauge.registry import Registry
from anygauge.strategies.degrees import stages_per_rank
from anygauge.training.auto import AUTO, candidates
from anygauge.training.strategy import (
    check_batch,
    check_installed,
    check_ranks,
    check_strategy,
    share_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What runs are held against.

    Attributes:
        backend: that they would have.
        card: None where it is not described.
        machine: None where the cards alone are known.
    """

    backend: str
    card: Card | None
    machine: Machine | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run, what it takes, whether that fits, and how long a step takes.

    Attributes:
        fit: None where the card's memory is not known.
        time: None where a rate is not known that it needs.
        untimed: which.
    """

    run: RunFile
    memory: RunMemory
    fit: Fit | None
    time: Duration | None = None
    untimed: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.fit is not None and self.fit.fits


class Try(Protocol):
    """`Trials`, or what stands in for it in a test."""

    def __call__(self, run: RunFile, target: Target) -> Trial:
        """See `Trials.__call__`."""


class Trials:
    """Rehearses runs; one process at a time does it, for one number of ranks.

    Args:
        waiting: what to show during a rehearsal, given its subject.
        first: a process for the first of them, which imports meanwhile.
    """

    def __init__(
        self,
        registry: Registry,
        waiting: Callable[[str], AbstractContextManager[Any]] = lambda subject: nullcontext(),
        first: Rehearser | None = None,
    ) -> None:
        self.registry = registry
        self._waiting = waiting
        self._first = first
        self._planner: Planner | None = None
        self._found: dict[tuple[str, int, str], RunMemory | AnygaugeError] = {}

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        if self._planner is not None:
            self._planner.__exit__(*error)
            self._planner = None

    def __call__(self, run: RunFile, target: Target) -> Trial:
        """Rehearse a run, unless one like it was, and hold it against a machine.

        Raises:
            AnygaugeError: what the run's ranks would refuse, or what cannot be rehearsed.
        """
        ranks = run.launch.nodes * run.launch.devices
        made = self.registry.create_backend(target.backend, run.backend_options)
        if run.strategy.name == AUTO:
            return self._first_that_fits(
                candidates(run, self.registry, made, ranks, ranks_run_here=False), target
            )
        spec = self.registry.find_strategy(run.strategy.name).spec
        check_ranks(spec, ranks, self.registry)
        # It is rehearsed here, wherever the run's ranks will be.
        check_installed(spec, self.registry)
        check_strategy(run, self.registry, made, ranks, ranks_run_here=False)
        check_batch(run, self.registry, ranks)
        memory = self._rehearsed(run, target.backend, ranks)
        held = None
        if target.card is not None:
            disk = on_disk(run, memory, ranks)
            held = fit(memory, target.card, ranks, run.launch.devices, target.machine, disk)
        time, untimed = timed(run, memory, target, self.registry)
        return Trial(run=run, memory=memory, fit=held, time=time, untimed=untimed)

    def _first_that_fits(self, forms: Sequence[RunFile], target: Target) -> Trial:
        """Of what strategy `auto` may become; where none fits, the one that lacks least."""
        tried: list[Trial] = []
        refused: list[AnygaugeError] = []
        for form in forms:
            try:
                trial = self(form, target)
            except AnygaugeError as error:
                refused.append(error)
                continue
            if trial.fit is None or trial.fits:
                return trial
            tried.append(trial)
        if not tried:
            raise refused[0]
        return max(tried, key=lambda one: 0 if one.fit is None else one.fit.margin)

    def _rehearsed(self, run: RunFile, backend: str, ranks: int) -> RunMemory:
        run = _in_memory(run)
        values = values_of(run)
        same = {k: v for k, v in values.items() if k not in ("launch", "name", "output", "backend")}
        key = backend, ranks, json.dumps(same, default=str)
        if key not in self._found:
            try:
                with self._waiting(f"rehearsing {_subject(run, ranks)}"):
                    self._found[key] = self._of_ranks(ranks).rehearse(run, backend)
            except AnygaugeError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, AnygaugeError):
            raise found
        return found

    def _of_ranks(self, ranks: int) -> Planner:
        if self._planner is None or self._planner.world_size != ranks:
            self.__exit__()
            first, self._first = self._first, None
            self._planner = Planner(ranks) if first is None else Planner(ranks, first=first)
        return self._planner


def timed(
    run: RunFile, memory: RunMemory, target: Target, registry: Registry
) -> tuple[Duration | None, str]:
    """How long a step takes, or why that is not known."""
    if target.card is None:
        return None, "no machine is named"
    ranks = run.launch.nodes * run.launch.devices
    parts = share_of(run, registry, 0, ranks).count
    batch, length = run.train.global_batch_size, run.data.max_length
    per_token, per_position = memory.model_flops
    stages = stages_of(run)
    rounds = accumulation(batch, run.train.sequences_at_once(parts), parts)
    try:
        return duration(
            memory.work,
            target.card,
            Ranks(
                ranks=ranks,
                per_machine=run.launch.devices,
                stages=stages,
                rounds=rounds * (stages_per_rank(run.strategy) if stages > 1 else 1),
            ),
            machine=target.machine,
            dtype=memory.precision.param_dtype,
            tokens=batch * length,
            flops=batch * length * (per_token + per_position * length),
        ), ""
    except UnknownRateError as error:
        return None, str(error)


def _subject(run: RunFile, ranks: int) -> str:
    rows, length = run.train.micro_batch_size, run.data.max_length
    return f"{run.strategy.name} on {ranks} ranks, {rows} x {length:,} tokens"


def _in_memory(run: RunFile) -> RunFile:
    """A run whose optimizer is on a disk, with that in the host's memory: a disk is not opened."""
    if getattr(run.strategy, "nvme", None) is None:
        return run
    return changed(run, {"strategy.nvme": None})


def changed(run: RunFile, lines: Mapping[str, Any]) -> RunFile:
    """A run with other values; a mapping replaces a whole section.

    Args:
        lines: dotted path -> value.

    Raises:
        RunFileError: no run file can say so.
    """
    values = values_of(run)
    for path, value in lines.items():
        *sections, name = path.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    try:
        return RunFile.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise RunFileError(error.errors(include_url=False)[0]["msg"]) from None
