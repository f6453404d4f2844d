"""A run is planned before its ranks start: what cannot fit this machine's devices is refused.

A process of its own plans while the checks of `anygauge.cli.preflight` run. No
plan is made where arithmetic tells that the run is far from any limit. Strategy `auto` becomes the
first form that fits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from anygauge.config.strategies import default_section
from anygauge.interface import AnygaugeError, Backend, Card, RunFileError
from anygauge.launch.event_format import size
from anygauge.models.hub import copy_of, names_hub
from anygauge.planning.fit import Fit, most_bytes
from anygauge.planning.machines import Hardware, measured_files
from anygauge.planning.process import Planner, TooLongError
from anygauge.planning.trials import Target, Trial
from anygauge.registry import Registry, Selection
from anygauge.training.auto import AUTO, candidates, in_words
from anygauge.training.strategy import share_of

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.config.schema import RunFile
    from anygauge.planning.memory import RunMemory

PATIENCE_S = 30.0
"""Seconds from the beginning of the checks that a plan gets at least; it may take as long as they
do."""
AUTO_PATIENCE_S = 120.0
"""Likewise where several strategies are tried."""
UNDECIDED = "the ranks decide once their devices are open"
SMALL = 0.25
"""Part of a device's memory below which nothing is planned."""
_ASK = "`anygauge plan RUN.yaml --machine NAME` plans for a machine that you name"

FoundT = TypeVar("FoundT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What is known of a run's memory before it starts.

    Attributes:
        lines: for whoever starts it.
        note: what should be looked at; "" for nothing.
        found: of the plan; None where there was none.
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
    """Check a run and plan it; returns it with what was found.

    Args:
        check: of model and rows.
        asked: True: plan also where that is not needed; False: never.
        force: refuse nothing.

    Raises:
        AnygaugeError: what ranks would refuse, or the run cannot fit.
    """
    card, unknown = _card(intent)
    expected = _without_a_plan(intent, card, unknown, asked)
    if expected is not None:
        found = check(intent)
    else:
        target = Target(backend=intent.job.backend, card=card)
        began, planner = time.monotonic(), None
        with contextlib.ExitStack() as stack:
            if _is_here(intent.run):
                planner = stack.enter_context(_planner(intent, target))
            found = check(intent)
            if planner is None:
                began, planner = time.monotonic(), stack.enter_context(_planner(intent, target))
            expected = _planned(intent, card, planner, began, force)
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
        joined: another launcher has started this process, which plans nothing.

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


def _card(intent: Intent) -> tuple[Card | None, str]:
    """What this machine's devices are, and why their memory is not known; "" where it is."""
    if intent.registry.find_launcher(intent.run.launch.launcher).spec.remote:
        return None, f"since ranks run on other machines; {_ASK}"
    names = intent.selection.probe.cards
    card = Hardware.load(intent.registry, measured_files()).of_devices(names)
    if card is not None and card.memory is not None:
        return card, ""
    seen = " and ".join(names) or f"the devices of {intent.job.backend}"
    return card, f"since no description covers {seen}; {_ASK}"


def _is_here(run: RunFile) -> bool:
    """Whether the model's configuration need not be fetched before."""
    name = run.model.name
    if name is None or not names_hub(name):
        return True
    return copy_of(name, run.model.revision) is not None


def _without_a_plan(
    intent: Intent, card: Card | None, unknown: str, asked: bool | None
) -> Expectation | None:
    """What is known where no plan is needed, or none can be made; None: make one."""
    memory = memory_of_rank(card, intent.job.launch.devices)
    most = None if asked else surely_small(intent.run, intent.registry, memory)
    if asked is False:
        return Expectation() if most is not None else _undecided(intent, "")
    if unknown and (not asked or intent.run.strategy.name == AUTO):
        return Expectation(lines=(f"memory: not planned, {unknown}",))
    if most is not None and memory is not None:
        line = f"memory: needs at most {size(most)} of {size(memory)}, so no plan was made"
        return Expectation(lines=(line,))
    return None


def _undecided(intent: Intent, why: str) -> Expectation:
    """No plan was made: what `auto` is, the ranks decide."""
    note = f"memory was not planned: {why}" if why else ""
    if not intent.forms:
        return Expectation(note=note)
    undecided = intent.run.model_copy(update={"strategy": default_section()})
    return Expectation(note=note, run=undecided, why=UNDECIDED)


def _planner(intent: Intent, target: Target) -> Planner:
    return Planner(intent.forms or (intent.run,), target, intent.run.environment)


def _planned(
    intent: Intent, card: Card | None, planner: Planner, began: float, force: bool
) -> Expectation:
    """What a plan says; of `auto`, the plan of the first form that fits.

    Args:
        began: when its process did; see `time.monotonic`.

    Raises:
        RunFileError: the run cannot fit.
    """
    patience_s = AUTO_PATIENCE_S if len(intent.forms) > 1 else PATIENCE_S
    try:
        trial = planner.trial(began + patience_s - time.monotonic())
    except TooLongError:
        why = f"a plan takes longer than {patience_s:.0f} s; `anygauge plan RUN.yaml` waits for it"
        return _undecided(intent, why)
    except AnygaugeError as error:
        return _undecided(intent, str(error).partition("\n")[0])
    chosen, why = None, ""
    lines: tuple[str, ...] = ()
    fit = trial.fit
    if trial.run != intent.run:
        reasons = [_why_not(form, found) for form, found in trial.passed_over]
        if not trial.fits:
            reasons = ["no strategy fits, and this one needs least", *reasons]
        chosen, why = trial.run, f"auto: {'; '.join(reasons)}"
        lines = (f"strategy: {in_words(trial.run)} ({why})",)
    step_s = None if trial.time is None else trial.time.step
    known = Expectation(lines=lines, found=trial.memory, step_s=step_s, run=chosen, why=why)
    if card is None or fit is None:
        line = f"memory: {size(trial.memory.worst[1].total)} of tensors on each rank"
        return replace(known, lines=(*lines, line))
    has = f"{card.name} has {size(fit.memory)} per rank"
    on_top = fit.needed - fit.tensors
    if trial.fits:
        line = f"memory: needs {size(fit.tensors)} of tensors, {size(on_top)} on top; {has}"
        return replace(known, lines=(*lines, line))
    words = f"{_needs(fit, trial.memory)}, and {has}"
    # What is surely too much: tensors alone, without the estimates on top of them.
    if fit.tensors + (card.reserved or 0) <= fit.memory:
        return replace(known, note=f"the run may not fit: {words}")
    if force:
        return replace(known, note=f"the run cannot fit: {words}")
    auto = f", with strategy {in_words(chosen)}, which needs least" if chosen else ""
    raise RunFileError(
        f"the run cannot fit{auto}: {words}. `anygauge plan RUN.yaml` says what to change; --force "
        "starts the run anyway"
    )


def _why_not(form: RunFile, found: Trial | AnygaugeError) -> str:
    if isinstance(found, AnygaugeError):
        return f"{in_words(form)} cannot: {str(found).partition(chr(10))[0]}"
    assert found.fit is not None, "what is not known to lack anything is taken"
    return f"{in_words(form)} would need {size(found.fit.needed)} of {size(found.fit.memory)}"


def _needs(fit: Fit, found: RunMemory) -> str:
    kinds = sorted(found.device[fit.phase].kinds.items(), key=lambda one: -one[1])
    listed = ", ".join(f"{size(count)} {kind}" for kind, count in kinds if count)
    rest = size(fit.needed - fit.tensors)
    return (
        f"each rank needs {size(fit.needed)} in phase {fit.phase!r} ({listed}; {rest} on top of "
        "tensors)"
    )
