"""A run is rehearsed before its ranks start: what cannot fit this machine's devices is refused.

The rehearsal runs in its own process while the checks of `anygauge.cli.preflight` run, and
is left out where arithmetic tells that the run is far from any limit. Strategy `auto` becomes the
first that fits.
"""

from __future__ import annotations

import contextlib
import time as clock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from anygauge.cli.lines import size
from anygauge.config.strategies import default_section
from anygauge.interface import AnygaugeError, Backend, Card, RunFileError
from anygauge.models.hub import copy_of, names_hub
from anygauge.planning.fit import Fit, fit, most_bytes
from anygauge.planning.machines import Hardware, measured_files
from anygauge.planning.planner import Planner
from anygauge.planning.process import TooLongError
from anygauge.planning.trials import Target, timed
from anygauge.registry import Registry, Selection
from anygauge.training.auto import AUTO, candidates, in_words
from anygauge.training.strategy import share_of

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.config.schema import RunFile
    from anygauge.planning.memory import RunMemory
    from anygauge.planning.time import Duration

PATIENCE_S = 30.0
"""Seconds from its beginning that a rehearsal gets at least; it may take as long as the checks."""
AUTO_PATIENCE_S = 120.0
"""Likewise where several strategies are tried."""
UNDECIDED = "the ranks decide once their devices are open"
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
        run: with the strategy that `auto` became, if that is not the first of `Intent.forms`.
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
        job = replace(job, strategy=self.run.strategy.name, strategy_why=self.why)
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
        found = check(intent)
        expected = rehearsal.result(force=force)
    decided = expected.applied_to(intent)
    if expected.run is not None and expected.run.strategy.name != AUTO:
        found = check(decided)
    return decided, found, expected


def forms_of_auto(
    run: RunFile, registry: Registry, backend: Backend, selection: Selection, *, joined: bool
) -> tuple[tuple[RunFile, ...], str]:
    """What a run's strategy `auto` may be, the fastest first, and why it is that until it is known
    not to fit; no strategy where the ranks must decide.

    Args:
        joined: another launcher has started this process, which rehearses nothing.

    Raises:
        AnygaugeError: no strategy can train it.
    """
    launch = run.launch
    ranks = launch.nodes * launch.devices
    if registry.find_launcher(launch.launcher).spec.remote:
        return (), UNDECIDED
    forms = candidates(run, registry, backend, ranks, ranks_run_here=selection.probe.available)
    card = Hardware.load(registry, measured_files()).of_devices(selection.probe.cards)
    memory = memory_of_rank(card, launch.devices)
    if memory is None:
        return (tuple(forms[:1]), "auto: there is one rank") if ranks == 1 else ((), UNDECIDED)
    if joined and surely_small(forms[0], registry, memory) is None:
        return (), UNDECIDED
    return tuple(forms), "auto: the whole model fits each device"


def surely_small(run: RunFile, registry: Registry, memory: int | None) -> int | None:
    """The most bytes that a rank can take, if they are known and far below what its device has."""
    ranks = run.launch.nodes * run.launch.devices
    most = None if memory is None else most_bytes(run, share_of(run, registry, 0, ranks).count)
    return most if most is not None and memory is not None and most < SMALL * memory else None


def memory_of_rank(card: Card | None, devices: int) -> int | None:
    """What a rank's device has, in bytes; None: not known."""
    if card is None or card.memory is None:
        return None
    return card.memory // (devices if card.shared_memory else 1)


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

    def result(self, *, force: bool = False) -> Expectation:
        """What was found; where the model was not there before, it is now.

        Args:
            force: refuse nothing.

        Raises:
            RunFileError: the run cannot fit.
        """
        if self._planner is None and self._answer is None:
            self._begin()
        if self._planner is None:
            assert self._answer is not None
            return self._answer
        try:
            self._try(self._planner)
        except TooLongError:
            return self._unplanned(
                f"the rehearsal takes longer than {self._patience_s:.0f} s; `anygauge plan "
                "RUN.yaml` waits for it"
            )
        if not self._trials:
            return self._unplanned(self._left_out[0])
        return self._held_against(force)

    def _unplanned(self, why: str) -> Expectation:
        """Nothing was found: what `auto` is, the ranks decide."""
        run = self._intent.run
        note = f"memory was not planned: {why}" if why else ""
        if not self._intent.forms:
            return Expectation(note=note)
        undecided = run.model_copy(update={"strategy": default_section()})
        return Expectation(note=note, run=undecided, why=UNDECIDED)

    def _begin(self) -> None:
        """Start what must be rehearsed, or say why nothing must."""
        intent = self._intent
        if self._asked is False:
            self._unknown()
            small = surely_small(intent.run, intent.registry, self._memory) is not None
            self._answer = Expectation() if small else self._unplanned("")
            return
        why = self._unknown()
        if why and (not self._asked or intent.run.strategy.name == AUTO):
            self._answer = Expectation(lines=(f"memory: not planned, {why}",))
            return
        most = None if self._asked else surely_small(intent.run, intent.registry, self._memory)
        if most is not None:
            line = f"memory: needs at most {size(most)} of {size(self._memory or 0)}"
            self._answer = Expectation(lines=(f"{line}, so not rehearsed",))
            return
        self._runs = [*intent.forms] or [intent.run]
        if len(self._runs) > 1:
            self._patience_s = AUTO_PATIENCE_S
        planner = Planner(intent.job.world_size, intent.run.environment)
        self._planner = self._stack.enter_context(planner)
        self._until = clock.monotonic() + self._patience_s
        planner.ask(self._runs[0], intent.job.backend)

    def _try(self, planner: Planner) -> None:
        """Rehearse until one fits; the first has been asked about.

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
                return
            self._left_out.append(
                f"{in_words(run)} would need {size(fits.needed)} of {size(fits.memory)}"
            )

    def _held_against(self, force: bool) -> Expectation:
        taken = max(self._trials, key=lambda one: one.fits.left if one.fits else 0)
        chosen, why = None, ""
        lines: tuple[str, ...] = ()
        if taken.run is not self._intent.run:
            reasons = self._left_out
            if taken.fits is not None and taken.fits.left < 0:
                reasons = ["no strategy fits, and this one needs least", *reasons]
            chosen, why = taken.run, f"auto: {'; '.join(reasons)}"
            lines = (f"strategy: {in_words(taken.run)} ({why})",)
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
        return memory_of_rank(self._card, self._intent.job.launch.devices)


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
