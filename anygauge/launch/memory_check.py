"""Decides whether to plan a run before its ranks start, and reports what the plan found.

No plan is made where arithmetic tells that the run is far from any limit. What cannot fit this
machine's devices is refused. Strategy `auto` becomes the first form that fits.
What only a plan needs is imported by functions: the process that checks a run imports this, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge.interface import AnygaugeError, RunFileError
from anygauge.launch.decision import UNDECIDED, Decision
from anygauge.registry import Registry, select_backend
from anygauge.training.auto import AUTO, candidates, forms_of, in_words
from anygauge.training.build_strategy import share_of
from anygauge.util.text import format_bytes

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.interface import Backend, Card
    from anygauge.planning.fit import Fit
    from anygauge.planning.forecast import RunMemory
    from anygauge.planning.trials import Trial
    from anygauge.registry import Selection

SMALL_PART = 0.25
"""Part of a device's memory below which nothing is planned."""
_PLAN_HINT = "`anygauge plan RUN.yaml --machine NAME` plans for a machine that you name"


def forms_of_auto(
    run: RunFile, registry: Registry, backend: Backend, selection: Selection
) -> tuple[list[RunFile], str]:
    """What a run's strategy `auto` may be on this machine's devices, the fastest first, and why it
    is that until it is known not to fit; no strategy where the ranks must decide.

    Raises:
        AnygaugeError: no strategy can train it.
    """
    ranks = run.launch.nodes * run.launch.devices
    forms = candidates(run, registry, backend, ranks, ranks_run_here=selection.probe.available)
    card = _describe_card(registry, selection.probe.cards)
    if memory_of_rank(card, run.launch.devices) is None:
        return (forms[:1], "auto: there is one rank") if ranks == 1 else ([], UNDECIDED)
    return forms, "auto: the whole model fits each device"


def form_taken(form: RunFile, registry: Registry, why: str) -> Decision:
    """Return the decision that strategy `auto` is this one."""
    forms = forms_of(form, registry, form.launch.nodes * form.launch.devices)
    return Decision(form=forms.index(form), strategy=form.strategy.name, why=why)


def surely_small(run: RunFile, registry: Registry, memory: int | None) -> int | None:
    """The most bytes that a rank can take, if they are known and far below what its device has."""
    from anygauge.planning.fit import most_bytes

    ranks = run.launch.nodes * run.launch.devices
    most = None if memory is None else most_bytes(run, share_of(run, registry, 0, ranks).count)
    return most if most is not None and memory is not None and most < SMALL_PART * memory else None


def memory_of_rank(card: Card | None, devices: int) -> int | None:
    """What a rank's device has, in bytes; None: not known."""
    if card is None or card.memory is None:
        return None
    return card.memory // (devices if card.shared_memory else 1)


def without_a_plan(
    run: RunFile,
    forms: Sequence[RunFile],
    why: str,
    registry: Registry,
    selection: Selection,
    asked: bool | None,
) -> Decision | None:
    """Decide where no plan is needed, or none can be made; None: make one.

    Args:
        run: as the first form that `auto` may be.
        forms, why: see `forms_of_auto`; none where its strategy is named.
        asked: True: plan also where that is not needed; False: never.
    """
    first = form_taken(forms[0], registry, why) if forms else Decision()
    memory = memory_of_rank(_describe_card(registry, selection.probe.cards), run.launch.devices)
    most = None if asked else surely_small(run, registry, memory)
    if asked is False:
        return first if most is not None else Decision()
    if memory is None and (not asked or run.strategy.name == AUTO):
        seen = " and ".join(selection.probe.cards) or f"the devices of {selection.spec.name}"
        line = f"memory: not planned, since no description covers {seen}; {_PLAN_HINT}"
        return replace(first, lines=(line,))
    if most is not None and memory is not None:
        needs = f"needs at most {format_bytes(most)} of {format_bytes(memory)}"
        return replace(first, lines=(f"memory: {needs}, so no plan was made",))
    return None


def not_planned(why: str) -> Decision:
    """Return the decision where a plan could not be made."""
    first = why.partition("\n")[0]
    return Decision(note=f"memory was not planned: {first}")


def look_at_machine(
    run: RunFile, registry: Registry, backend: str, asked: bool | None
) -> tuple[list[RunFile], tuple[str, ...], Decision | None]:
    """Look on the job's first machine, where the command runs on another: what strategy `auto` may
    be, what the devices are called, and what is known without a plan.

    Raises:
        AnygaugeError: it has no such devices, or no strategy can train the run.
    """
    selection = select_backend(registry, backend)
    forms: list[RunFile] = []
    why = ""
    if run.strategy.name == AUTO:
        made = registry.create_backend(backend, run.backend_options)
        forms, why = forms_of_auto(run, registry, made, selection)
    first = forms[0] if forms else run
    return (
        forms,
        selection.probe.cards,
        without_a_plan(first, forms, why, registry, selection, asked),
    )


def plan_memory(
    run: RunFile,
    forms: Sequence[RunFile],
    registry: Registry,
    backend: str,
    cards: Sequence[str],
    *,
    force: bool = False,
    begin: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Decision:
    """Plan the first form of a run that fits, and report what that means for it.

    Args:
        forms: that `auto` may be; none where the strategy is named.
        cards: what this machine's devices are called; none where ranks run on others.
        force: refuse nothing.
        begin: told of each form.

    Raises:
        RunFileError: the run cannot fit.
    """
    from anygauge.planning.trials import Target, Trials

    card = _describe_card(registry, cards)
    target = Target(backend=backend, card=card)
    try:
        trial = Trials(registry, begin).first_that_fits(forms or [run], target)
    except AnygaugeError as error:
        return not_planned(str(error))
    known = Decision()
    lines: tuple[str, ...] = ()
    if forms:
        why = "auto: the whole model fits each device"
        if trial.run != forms[0]:
            reasons = [_why_not(passed, found) for passed, found in trial.passed_over]
            if not trial.fits:
                reasons = ["no strategy fits, and this one needs least", *reasons]
            why = f"auto: {'; '.join(reasons)}"
            lines = (f"strategy: {in_words(trial.run)} ({why})",)
        known = form_taken(trial.run, registry, why)
    known = replace(
        known,
        memory={phase: peak.total for phase, peak in trial.memory.device.items()},
        step_s=None if trial.time is None else trial.time.step,
    )
    fit = trial.fit
    if card is None or fit is None:
        line = f"memory: {format_bytes(trial.memory.worst_phase[1].total)} of tensors on each rank"
        return replace(known, lines=(*lines, line))
    has = f"{card.name} has {format_bytes(fit.memory)} per rank"
    if trial.fits:
        on_top = format_bytes(fit.needs - fit.tensors)
        line = f"memory: needs {format_bytes(fit.tensors)} of tensors, {on_top} on top; {has}"
        return replace(known, lines=(*lines, line))
    words = f"{_needs_text(fit, trial.memory)}, and {has}"
    # What is surely too much: tensors alone, without the estimates on top of them.
    if fit.tensors + (card.reserved or 0) <= fit.memory:
        return replace(known, note=f"the run may not fit: {words}", lines=lines)
    if force:
        return replace(known, note=f"the run cannot fit: {words}", lines=lines)
    chosen = f", with strategy {in_words(trial.run)}, which needs least" if lines else ""
    raise RunFileError(
        f"the run cannot fit{chosen}: {words}. `anygauge plan RUN.yaml` says what to change; "
        "--force starts the run anyway"
    )


def _describe_card(registry: Registry, cards: Sequence[str]) -> Card | None:
    """What a machine's devices are."""
    from anygauge.planning.machines import Hardware, measured_files

    return Hardware.load(registry, measured_files()).of_devices(cards)


def _why_not(form: RunFile, found: Trial | AnygaugeError) -> str:
    if isinstance(found, AnygaugeError):
        return f"{in_words(form)} cannot: {str(found).partition(chr(10))[0]}"
    fit = found.fit
    assert fit is not None, "what is not known to lack anything is taken"
    return f"{in_words(form)} would need {format_bytes(fit.needs)} of {format_bytes(fit.memory)}"


def _needs_text(fit: Fit, found: RunMemory) -> str:
    kinds = sorted(found.device[fit.phase].kinds.items(), key=lambda one: -one[1])
    listed = ", ".join(f"{format_bytes(count)} {kind}" for kind, count in kinds if count)
    rest = format_bytes(fit.needs - fit.tensors)
    return (
        f"each rank needs {format_bytes(fit.needs)} in phase {fit.phase!r} "
        f"({listed}; {rest} on top of tensors)"
    )
