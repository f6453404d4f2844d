"""Whether a run is planned before its ranks start, and what its plan says of it.

No plan is made where arithmetic tells that the run is far from any limit. What cannot fit this
machine's devices is refused. Strategy `auto` becomes the first form that fits.
What only a plan needs is imported by functions: the process that checks a run imports this, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anygauge.config.resolved import parse_run
from anygauge.config.strategies import default_section, section_of
from anygauge.interface import AnygaugeError, RunFileError
from anygauge.registry import Registry, installed_plugins
from anygauge.training.auto import AUTO, candidates, in_words
from anygauge.training.strategy import share_of
from anygauge.util.schema import Section
from anygauge.util.text import size

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.interface import Backend, Card, Job
    from anygauge.planning.fit import Fit
    from anygauge.planning.memory import RunMemory
    from anygauge.planning.trials import Trial
    from anygauge.registry import Selection

UNDECIDED = "the ranks decide once their devices are open"
SMALL = 0.25
"""Part of a device's memory below which nothing is planned."""
_ASK = "`anygauge plan RUN.yaml --machine NAME` plans for a machine that you name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What is known of a run's memory before it starts.

    Attributes:
        lines: for whoever starts it.
        note: what should be looked at; "" for nothing.
        memory: phase -> planned bytes of tensors; empty where there was no plan.
        step_s: planned seconds of a step; None: not known.
        form: which of the forms of `auto` it is; None: the ranks decide.
        why: why that one, if it is not the first.
    """

    lines: tuple[str, ...] = ()
    note: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    step_s: float | None = None
    form: int | None = 0
    why: str = ""

    def applied_to(self, run: RunFile, job: Job, forms: Sequence[RunFile]) -> tuple[RunFile, Job]:
        """Run and job with what was found.

        Args:
            run: the first of `forms`, where there are any.
        """
        job = replace(job, expected_memory=dict(self.memory), expected_step_s=self.step_s)
        if not forms or self.form == 0:
            return run, job
        if self.form is None:
            run, why = run.model_copy(update={"strategy": default_section()}), UNDECIDED
        else:
            run, why = forms[self.form], self.why
        return run, replace(job, strategy=run.strategy.name, strategy_why=why)


class PlanQuestion(Section):
    """What is planned.

    Attributes:
        run: as `run_json` gives it.
        strategies: fields that the strategy of each form of `auto` sets; empty where it is named.
        backend: name of the chosen one.
        cards: what this machine's devices are called; None where ranks run on others.
        force: refuse nothing.
    """

    run: str
    strategies: tuple[dict[str, Any], ...] = ()
    backend: str
    cards: tuple[str, ...] | None
    force: bool = False

    @property
    def forms(self) -> list[RunFile]:
        """Of the run, the fastest first."""
        run = parse_run(self.run)
        sections = [section_of(each["name"]).model_validate(each) for each in self.strategies]
        return [run.model_copy(update={"strategy": each}) for each in sections] or [run]


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
    memory = memory_of_rank(_described(registry, selection), launch.devices)
    if memory is None:
        return (tuple(forms[:1]), "auto: there is one rank") if ranks == 1 else ((), UNDECIDED)
    if joined and surely_small(forms[0], registry, memory) is None:
        return (), UNDECIDED
    return tuple(forms), "auto: the whole model fits each device"


def surely_small(run: RunFile, registry: Registry, memory: int | None) -> int | None:
    """The most bytes that a rank can take, if they are known and far below what its device has."""
    from anygauge.planning.fit import most_bytes

    ranks = run.launch.nodes * run.launch.devices
    most = None if memory is None else most_bytes(run, share_of(run, registry, 0, ranks).count)
    return most if most is not None and memory is not None and most < SMALL * memory else None


def memory_of_rank(card: Card | None, devices: int) -> int | None:
    """What a rank's device has, in bytes; None: not known."""
    if card is None or card.memory is None:
        return None
    return card.memory // (devices if card.shared_memory else 1)


def without_a_plan(
    run: RunFile, job: Job, registry: Registry, selection: Selection, asked: bool | None
) -> Expectation | None:
    """What is known where no plan is needed, or none can be made; None: make one.

    Args:
        asked: True: plan also where that is not needed; False: never.
    """
    remote = registry.find_launcher(run.launch.launcher).spec.remote
    card = None if remote else _described(registry, selection)
    memory = memory_of_rank(card, job.launch.devices)
    most = None if asked else surely_small(run, registry, memory)
    if asked is False:
        return Expectation(form=0 if most is not None else None)
    if memory is None and (not asked or run.strategy.name == AUTO):
        seen = " and ".join(selection.probe.cards) or f"the devices of {job.backend}"
        why = "ranks run on other machines" if remote else f"no description covers {seen}"
        return Expectation(lines=(f"memory: not planned, since {why}; {_ASK}",))
    if most is not None and memory is not None:
        line = f"memory: needs at most {size(most)} of {size(memory)}, so no plan was made"
        return Expectation(lines=(line,))
    return None


def not_planned(why: str) -> Expectation:
    """What is known where a plan could not be made."""
    first = why.partition("\n")[0]
    return Expectation(note=f"memory was not planned: {first}", form=None)


def planned(question: PlanQuestion) -> Expectation:
    """Plan the first form of a run that fits, and say what that means for it.

    Raises:
        RunFileError: the run cannot fit.
    """
    from anygauge.planning.machines import Hardware, measured_files
    from anygauge.planning.trials import Target, Trials

    registry = installed_plugins()
    card = None
    if question.cards is not None:
        card = Hardware.load(registry, measured_files()).of_devices(question.cards)
    forms = question.forms
    try:
        trial = Trials(registry).first_that_fits(forms, Target(backend=question.backend, card=card))
    except AnygaugeError as error:
        return not_planned(str(error))
    form, why = forms.index(trial.run), ""
    lines: tuple[str, ...] = ()
    if form:
        reasons = [_why_not(passed, found) for passed, found in trial.passed_over]
        if not trial.fits:
            reasons = ["no strategy fits, and this one needs least", *reasons]
        why = f"auto: {'; '.join(reasons)}"
        lines = (f"strategy: {in_words(trial.run)} ({why})",)
    known = Expectation(
        memory={phase: peak.total for phase, peak in trial.memory.device.items()},
        step_s=None if trial.time is None else trial.time.step,
        form=form,
        why=why,
    )
    fit = trial.fit
    if card is None or fit is None:
        line = f"memory: {size(trial.memory.worst[1].total)} of tensors on each rank"
        return replace(known, lines=(*lines, line))
    has = f"{card.name} has {size(fit.memory)} per rank"
    if trial.fits:
        on_top = size(fit.needed - fit.tensors)
        line = f"memory: needs {size(fit.tensors)} of tensors, {on_top} on top; {has}"
        return replace(known, lines=(*lines, line))
    words = f"{_needs(fit, trial.memory)}, and {has}"
    # What is surely too much: tensors alone, without the estimates on top of them.
    if fit.tensors + (card.reserved or 0) <= fit.memory:
        return replace(known, note=f"the run may not fit: {words}", lines=lines)
    if question.force:
        return replace(known, note=f"the run cannot fit: {words}", lines=lines)
    chosen = f", with strategy {in_words(trial.run)}, which needs least" if form else ""
    raise RunFileError(
        f"the run cannot fit{chosen}: {words}. `anygauge plan RUN.yaml` says what to change; "
        "--force starts the run anyway"
    )


def _described(registry: Registry, selection: Selection) -> Card | None:
    """What this machine's devices are."""
    from anygauge.planning.machines import Hardware, measured_files

    return Hardware.load(registry, measured_files()).of_devices(selection.probe.cards)


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
