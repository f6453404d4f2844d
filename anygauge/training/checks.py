"""Checks a run's settings, quickly and without torch; holds what all checks find."""

from __future__ import annotations

from dataclasses import dataclass, field

from anygauge.config.schema import RunFile
from anygauge.interface import Backend, NotAvailableError, RunFileError, Setting
from anygauge.kernels.choose import KernelChoice, kernels_of_run
from anygauge.registry import Registry
from anygauge.registry.specs import refuse_if_missing


@dataclass(kw_only=True, slots=True)
class Findings:
    """What the checks found, other than refusals.

    Attributes:
        notes: what could not be checked here, and why.
        data: what became of the training rows; "" where they were not read.
        advice: on their length and on the learning rate, a line for each; "" where there is none.
        steps, epochs: of the run; None where its rows were not read, or not asked for.
        settings: of the engine, if asked for.
        engine_note: what is not known of these.
    """

    notes: list[str] = field(default_factory=list)
    data: str = ""
    advice: str = ""
    steps: int | None = None
    epochs: float | None = None
    settings: list[Setting] | None = None
    engine_note: str = ""


def check_settings(
    run: RunFile, backend: Backend, registry: Registry, *, ranks_run_here: bool
) -> dict[str, KernelChoice]:
    """Check run file and backend against each other's kernels; returns those of the run.

    Args:
        ranks_run_here: a kernel that lacks something on this machine is refused.

    Raises:
        AnygaugeError: kernels that ranks would refuse.
    """
    try:
        return kernels_of_run(run, backend, registry)
    except NotAvailableError:
        if ranks_run_here:
            raise
        return {}


def check_optimizer(run: RunFile, registry: Registry, *, need_software: bool) -> None:
    """Refuse an optimizer that is known not to work.

    Args:
        need_software: ranks will be started on this machine, so packages must be there.

    Raises:
        RunFileError: says which field to change.
        NotAvailableError: a package is missing.
    """
    section = run.train.optimizer
    if section.loraplus_lr_ratio is not None and run.adapter is None:
        raise RunFileError(
            "train.optimizer.loraplus_lr_ratio: applies to the B factors of an adapter, but the "
            "run has no adapter section; remove it, or add one"
        )
    provided = registry.find_optimizer(section.name)
    if provided.spec.changes_weights and run.checkpoint.result == "best":
        raise RunFileError(
            f"checkpoint.result: best: checkpoints lack the weights that {section.name} has "
            "evaluated. Leave it out, or use another train.optimizer.name"
        )
    if need_software:
        refuse_if_missing(provided, section)
