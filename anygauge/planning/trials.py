"""Runs planned and held against machines, each once: what every further answer is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from anygauge.config.resolved import values_of
from anygauge.config.schema import AUTO_ORDER, RunFile
from anygauge.data.batches import accumulation
from anygauge.interface import AnygaugeError, Backend, Card, RunFileError, UnsupportedError
from anygauge.planning.fit import Fit, fit, on_disk
from anygauge.planning.forecast import RunMemory
from anygauge.planning.machines import Machine
from anygauge.planning.time import Duration, UnknownRateError, step_duration
from anygauge.registry import Registry
from anygauge.strategies.shared.degrees import stages_per_rank
from anygauge.training.auto import AUTO, candidates
from anygauge.training.build_strategy import check_batch, check_installed, check_strategy, share_of
from anygauge.util.text import describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The machine that runs are planned for.

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
    """A run, what it takes, whether that fits its target, and how long a step takes there.

    Attributes:
        fit: None where the card's memory is not known.
        time: None where a rate is not known that it needs.
        untimed: which.
        passed_over: of strategy ``auto``: forms that come before this one, and why they are not it.
    """

    run: RunFile
    target: Target
    memory: RunMemory
    fit: Fit | None
    time: Duration | None = None
    untimed: str = ""
    passed_over: tuple[tuple[RunFile, Trial | AnygaugeError], ...] = ()

    @property
    def ranks(self) -> int:
        """All of the run's."""
        return self.run.launch.nodes * self.run.launch.devices

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.fit is not None and self.fit.fits

    @property
    def margin(self) -> int:
        """See `Fit.margin`; there is a card to hold it against."""
        assert self.fit is not None
        return self.fit.margin

    def record(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        fit, time = self.fit, self.time
        return {
            "ranks": self.ranks,
            "phase": self.memory.worst_phase[0],
            "fit": None if fit is None else fit.record(),
            "time": None if time is None else time.record(),
        }


Plan = Callable[[RunFile, Registry, Backend, int], RunMemory]
"""See `anygauge.planning.memory_plan.plan_run`."""


class Trials:
    """Plans runs in this process, each once.

    Args:
        waiting: what to show meanwhile, given the subject of a plan.
        plan: None: `plan_run`.
    """

    def __init__(
        self,
        registry: Registry,
        waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        plan: Plan | None = None,
    ) -> None:
        self.registry = registry
        self._waiting = waiting
        self._plan = plan
        self._memories: dict[tuple[str, int, str], RunMemory | AnygaugeError] = {}

    def __call__(self, run: RunFile, target: Target) -> Trial:
        """Plan a run, unless one like it was, and hold it against a machine.

        Raises:
            AnygaugeError: what the run's ranks would refuse, or what cannot be planned.
        """
        ranks = run.launch.nodes * run.launch.devices
        backend = self.registry.create_backend(target.backend, run.backend_options)
        if run.strategy.name == AUTO:
            forms = candidates(run, self.registry, backend, ranks, ranks_run_here=False)
            return self.first_that_fits(forms, target)
        check_strategy(run, self.registry, backend, ranks, ranks_run_here=False)
        # It is planned here, wherever the run's ranks will be.
        check_installed(self.registry.find_strategy(run.strategy.name).spec, self.registry)
        check_batch(run, self.registry, ranks)
        _check_type(run, target.card)
        memory = self._memory(run, backend, ranks)
        held = None
        if target.card is not None:
            disk = on_disk(run, memory, ranks)
            held = fit(memory, target.card, ranks, run.launch.devices, target.machine, disk)
        step, untimed = estimate_step_time(run, memory, target, self.registry)
        return Trial(run=run, target=target, memory=memory, fit=held, time=step, untimed=untimed)

    def first_that_fits(self, forms: Sequence[RunFile], target: Target) -> Trial:
        """Find the first of several forms of a run that fits; else the one that lacks least.

        Raises:
            AnygaugeError: all are refused; why the first is.
        """
        tried: list[tuple[RunFile, Trial | AnygaugeError]] = []
        trials: list[Trial] = []
        for form in forms:
            try:
                trials.append(self(form, target))
            except AnygaugeError as error:
                tried.append((form, error))
                continue
            tried.append((form, trials[-1]))
            if trials[-1].fit is None or trials[-1].fits:
                break
        if not trials:
            raise next(error for _, error in tried if isinstance(error, AnygaugeError))
        best = max(trials, key=lambda one: 0 if one.fit is None else one.fit.margin)
        others = tuple((form, found) for form, found in tried if found is not best)
        return replace(best, passed_over=others)

    def _memory(self, run: RunFile, backend: Backend, ranks: int) -> RunMemory:
        if getattr(run.strategy, "nvme", None) is not None:
            # With what is on a disk in the host's memory; see `on_disk`.
            run = with_changes(run, {"strategy.nvme": None})
        values = values_of(run)
        same = {k: v for k, v in values.items() if k not in ("launch", "name", "output", "backend")}
        key = backend.name, ranks, json.dumps(same, default=str)
        if key not in self._memories:
            rows, length = run.train.micro_batch_size, run.data.max_length
            subject = f"{run.strategy.name} on {ranks} ranks, {rows} x {length:,} tokens"
            with self._waiting(f"planning {subject}"):
                self._memories[key] = self._try_plan(run, backend, ranks)
        found = self._memories[key]
        if isinstance(found, AnygaugeError):
            raise found
        return found

    def _try_plan(self, run: RunFile, backend: Backend, ranks: int) -> RunMemory | AnygaugeError:
        if self._plan is None:  # it imports what takes long
            from anygauge.models.source import quiet_libraries
            from anygauge.planning.memory_plan import plan_run

            quiet_libraries()
            self._plan = plan_run
        try:
            return self._plan(run, self.registry, backend, ranks)
        except AnygaugeError as error:
            return error
        except Exception as error:
            return AnygaugeError(f"the run cannot be planned: {describe(error)}")


def fast_types(card: Card) -> list[str]:
    """List the types that runs may compute in and a card has rates of, ``auto``'s choice first."""
    return [kind for kind in AUTO_ORDER if kind in {**card.flops, **card.matmul}]


def _check_type(run: RunFile, card: Card | None) -> None:
    """Raises: UnsupportedError: the card computes in other types."""
    kinds, asked = [] if card is None else fast_types(card), run.precision.param_dtype
    if card is None or not kinds or asked == "auto":
        return
    if AUTO_ORDER.index(asked) < AUTO_ORDER.index(kinds[0]):
        raise UnsupportedError(
            f"precision.param_dtype: {asked}: the description of {card.name} ({card.origin}) has "
            f"rates for {', '.join(kinds)} alone. Set precision.param_dtype: {kinds[0]} (or auto); "
            f"if the card computes in {asked}, add its flops.{asked} in a file of your own "
            "(--hardware FILE.toml, docs/hardware.md)"
        )


def estimate_step_time(
    run: RunFile, memory: RunMemory, target: Target, registry: Registry
) -> tuple[Duration | None, str]:
    """How long a step takes, or why that is not known."""
    if target.card is None:
        return None, "no machine is named"
    ranks = run.launch.nodes * run.launch.devices
    parts = share_of(run, registry, 0, ranks).count
    stages = int(getattr(run.strategy, "pp", 1) or 1)
    batch, length = run.train.global_batch_size, run.data.max_length
    rounds = accumulation(batch, run.train.sequences_at_once(parts), parts)
    rounds *= stages_per_rank(run.strategy) if stages > 1 else 1
    per_token, per_position = memory.model_flops
    try:
        return step_duration(
            memory.work,
            target.card,
            ranks,
            run.launch.devices,
            pipeline=(stages, rounds),
            machine=target.machine,
            dtype=memory.precision.param_dtype,
            tokens=batch * length,
            flops=batch * length * (per_token + per_position * length),
        ), ""
    except UnknownRateError as error:
        return None, str(error)


def with_changes(run: RunFile, lines: Mapping[str, Any]) -> RunFile:
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
