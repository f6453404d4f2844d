"""A run is rehearsed before its ranks start: what cannot fit this machine's devices is refused.

The rehearsal runs in its own process while the checks of `anygauge.cli.preflight` run, and
is left out where arithmetic tells that the run is far from any limit. Strategy `auto` becomes the
fastest that fits.
"""

from __future__ import annotations

import contextlib
import time as clock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from anygauge.cli.lines import seconds, size
from anygauge.interface import AnygaugeError, Card, RunFileError
from anygauge.models.hub import copy_of, names_hub
from anygauge.planning.candidates import AUTO, candidates, in_words
from anygauge.planning.fit import Fit, fit, most_bytes
from anygauge.planning.planner import Planner
from anygauge.planning.process import TooLongError
from anygauge.planning.trials import Target, timed
from anygauge.registry import Hardware
from anygauge.registry.hardware import measured_files

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.config.schema import RunFile
    from anygauge.planning.memory import RunMemory
    from anygauge.planning.time import Duration

PATIENCE_S = 30.0
"""Seconds from its beginning that a rehearsal gets at least; it may take as long as the checks."""
AUTO_PATIENCE_S = 120.0
"""Likewise where several strategies are tried."""
AMONG = 3
"""Strategies that fit, of which the fastest is taken where the cards' rates are known."""
SMALL = 0.25
"""Part of a device's memory below which nothing is rehearsed."""
_ASK = "`anygauge plan RUN.yaml --machine NAME` plans for a machine that you name"

FoundT = TypeVar("FoundT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What is known of a run's memory before it starts.

    Attributes:
        lines: for whoever starts it.
        note: what should be looked at; "" for nothing.
        found: of the rehearsal; None where there was none.
        step_s: planned seconds of a step; None: not known.
        run: with the strategy that `auto` became; None where it became none here.
        why: why that one.
    """

    lines: tuple[str, ...] = ()
    note: str = ""
    found: RunMemory | None = None
    step_s: float | None = None
    run: RunFile | None = None
    why: str = ""

    def applied_to(self, intent: Intent) -> Intent:
        """The intent with what was found."""
        found = {} if self.found is None else self.found.device
        job = replace(
            intent.job,
            expected_memory={phase: peak.total for phase, peak in found.items()},
            expected_step_s=self.step_s,
        )
        if self.run is None:
            return replace(intent, job=job)
        job = replace(job, strategy=self.run.strategy.name, strategy_why=f"auto: {self.why}")
        return replace(intent, job=job, loaded=replace(intent.loaded, run=self.run))


def checked(
    intent: Intent,
    check: Callable[[Intent], FoundT],
    *,
    asked: bool | None = None,
    force: bool = False,
) -> tuple[Intent, FoundT, Expectation]:
    """Check a run and rehearse it; returns it with what was found.

    Args:
        check: of model and rows.
        asked: True: rehearse also where that is not needed; False: never.
        force: refuse nothing.

    Raises:
        AnygaugeError: what ranks would refuse, or the run cannot fit.
    """
    with rehearsing(intent, asked) as rehearsal:
        if intent.run.strategy.name == AUTO and rehearsal.begun:
            expected = rehearsal.result(force=force)
            intent = expected.applied_to(intent)
            return intent, check(intent), expected
        found = check(intent)
        expected = rehearsal.result(force=force)
    return expected.applied_to(intent), found, expected


@contextlib.contextmanager
def rehearsing(intent: Intent, asked: bool | None) -> Iterator[Rehearsal]:
    """Rehearse a run meanwhile; its process is gone afterwards, whatever happens."""
    with contextlib.ExitStack() as stack:
        yield Rehearsal(intent, asked, stack)


@dataclass(frozen=True, slots=True)
class _CheckedRun:
    """A run that was rehearsed, how it fits, and how long a step takes; None: not known."""

    run: RunFile
    found: RunMemory
    fits: Fit | None
    time: Duration | None


class Rehearsal:
    """One run's, which runs meanwhile; see `rehearsing`."""

    def __init__(self, intent: Intent, asked: bool | None, stack: contextlib.ExitStack) -> None:
        """Args: stack: ends the process."""
        self._intent = intent
        self._asked = asked
        self._stack = stack
        self._card: Card | None = None
        self._planner: Planner | None = None
        self._answer: Expectation | None = None
        self._runs: list[RunFile] = []
        self._patience_s = PATIENCE_S
        self._until = 0.0
        self._trials: list[_CheckedRun] = []
        self._left_out: list[str] = []
        model = intent.run.model
        fetched = model.name is None or not names_hub(model.name)
        if fetched or copy_of(model.name, model.revision) is not None:
            self._begin()

    @property
    def begun(self) -> bool:
        """Whether it need not wait for the model to be fetched."""
        return self._planner is not None or self._answer is not None

    def result(self, *, force: bool = False) -> Expectation:
        """What was found; where the model was not there before, it is now.

        Args:
            force: refuse nothing.

        Raises:
            RunFileError: the run cannot fit.
        """
        if not self.begun:
            self._begin()
        if self._planner is None:
            assert self._answer is not None
            return self._answer
        try:
            self._try(self._planner)
        except TooLongError:
            return Expectation(
                note=(
                    "memory was not planned: the rehearsal takes longer than "
                    f"{self._patience_s:.0f} s; `anygauge plan RUN.yaml` waits for it"
                )
            )
        if not self._trials:
            return Expectation(note=f"memory was not planned: {'; '.join(self._left_out)}")
        return self._held_against(force)

    def _begin(self) -> None:
        """Start what must be rehearsed, or say why nothing must."""
        intent = self._intent
        if self._asked is False:
            self._answer = Expectation()
            return
        why = self._unknown()
        if not self._asked:
            if why:
                self._answer = Expectation(lines=(f"memory: not planned, {why}",))
                return
            most, memory = self._most(), self._memory
            if most is not None and memory is not None and most < SMALL * memory:
                line = f"memory: needs at most {size(most)} of {size(memory)}, so not rehearsed"
                self._answer = Expectation(lines=(line,))
                return
        self._runs = [intent.run]
        if intent.run.strategy.name == AUTO and not why:
            self._patience_s = AUTO_PATIENCE_S
            name, options = intent.selection.spec.name, intent.run.backend_options
            self._runs = (
                candidates(
                    intent.run,
                    intent.registry,
                    intent.registry.create_backend(name, options),
                    intent.job.world_size,
                    ranks_run_here=intent.selection.probe.available,
                )
                or self._runs
            )
        planner = Planner(intent.job.world_size, intent.run.environment)
        self._planner = self._stack.enter_context(planner)
        self._until = clock.monotonic() + self._patience_s
        planner.ask(self._runs[0], intent.job.backend)

    def _try(self, planner: Planner) -> None:
        """Rehearse until one fits, or several of which it is known how fast they are.

        The first has been asked about.

        Raises:
            TooLongError: there is no time left, and none is known to fit.
        """
        job, card = self._intent.job, self._card
        target = Target(backend=job.backend, card=card)
        for number, run in enumerate(self._runs):
            try:
                if number:
                    planner.ask(run, job.backend)
                found = planner.answer(max(0.0, self._until - clock.monotonic()))
            except TooLongError:
                if self._fitting:
                    return
                raise
            except AnygaugeError as error:
                why = str(error).partition("\n")[0]
                several = len(self._runs) > 1
                self._left_out.append(f"{in_words(run)} cannot: {why}" if several else why)
                continue
            fits = None if card is None else fit(found, card, job.world_size, job.launch.devices)
            time = timed(run, found, target, self._intent.registry)[0]
            self._trials.append(_CheckedRun(run, found, fits, time))
            if fits is None or fits.left >= 0:
                if time is None or len(self._fitting) == AMONG:
                    return
                continue
            self._left_out.append(
                f"{in_words(run)} would need {size(fits.needed)} of {size(fits.memory)}"
            )

    def _held_against(self, force: bool) -> Expectation:
        if self._fitting:
            taken = min(self._fitting, key=lambda one: one.time.step if one.time else 0)
        else:
            taken = max(self._trials, key=lambda one: one.fits.left if one.fits else 0)
        chosen, why = None, ""
        lines: tuple[str, ...] = ()
        if taken.run is not self._intent.run:
            chosen, why = taken.run, self._why(taken)
            lines = (f"strategy: {in_words(taken.run)} (auto: {why})",)
        step_s = None if taken.time is None else taken.time.step
        known = Expectation(lines=lines, found=taken.found, step_s=step_s, run=chosen, why=why)
        card, fits = self._card, taken.fits
        if card is None or fits is None:
            peak = taken.found.worst[1].total
            return replace(known, lines=(*lines, f"memory: {size(peak)} of tensors on each rank"))
        if fits.left >= 0:
            line = f"memory: needs {size(fits.needed)}, {_has(fits, card)}"
            return replace(known, lines=(*lines, line))
        words = f"{_needs(fits, taken.found)}, and {_has(fits, card)}"
        # What is surely too much: tensors alone, without the estimates on top of them.
        if fits.tensors + (card.reserved or 0) <= fits.memory:
            return replace(known, note=f"the run may not fit: {words}")
        if force:
            return replace(known, note=f"the run cannot fit: {words}")
        auto = f", with strategy {in_words(taken.run)}, which needs least" if chosen else ""
        raise RunFileError(
            f"the run cannot fit{auto}: {words}. `anygauge plan RUN.yaml --suggest` suggests "
            "changes; --force starts the run anyway"
        )

    def _why(self, taken: _CheckedRun) -> str:
        if taken.fits is not None and taken.fits.left < 0:
            return f"no strategy fits, and this one needs least; {'; '.join(self._left_out)}"
        reasons = list(self._left_out)
        timed = [one for one in self._fitting if one.time is not None]
        if len(timed) > 1:
            steps = (f"{in_words(one.run)} {seconds(one.time.step)}" for one in timed if one.time)
            reasons.append(f"planned time of a step: {', '.join(steps)}")
        return "; ".join(reasons) or "the fastest that fits"

    @property
    def _fitting(self) -> list[_CheckedRun]:
        return [one for one in self._trials if one.fits is None or one.fits.left >= 0]

    def _unknown(self) -> str:
        """Why nothing is known of the devices; "" where `_card` says how much memory they have."""
        intent = self._intent
        if intent.registry.find_launcher(intent.run.launch.launcher).spec.remote:
            return f"since ranks run on other machines; {_ASK}"
        names = intent.selection.probe.cards
        self._card = Hardware.load(intent.registry, measured_files()).of_devices(names)
        if self._memory is not None:
            return ""
        seen = " and ".join(names) or f"the devices of {intent.job.backend}"
        return f"since no description covers {seen}; {_ASK}"

    @property
    def _memory(self) -> int | None:
        """Of a rank's device, in bytes."""
        if self._card is None or self._card.memory is None:
            return None
        shared = self._card.shared_memory
        return self._card.memory // (self._intent.job.launch.devices if shared else 1)

    def _most(self) -> int | None:
        from anygauge.training.strategy import share_of

        intent = self._intent
        share = share_of(intent.run, intent.registry, 0, intent.job.world_size)
        return None if self._memory is None else most_bytes(intent.run, share.count)


def _needs(fits: Fit, found: RunMemory) -> str:
    kinds = sorted(found.device[fits.phase].kinds.items(), key=lambda one: -one[1])
    listed = ", ".join(f"{size(count)} {kind}" for kind, count in kinds if count)
    rest = size(fits.needed - fits.tensors)
    return (
        f"each rank needs {size(fits.needed)} in phase {fits.phase!r} ({listed}; {rest} in "
        "addition to tensors)"
    )


def _has(fits: Fit, card: Card) -> str:
    return f"{card.name} has {size(fits.memory)} per rank"
