"""The strategies that `auto` stands for, in the order in which they are tried; imports no torch."""

from __future__ import annotations

from anygauge.config.schema import RunFile
from anygauge.config.strategies import section_of
from anygauge.interface import AnygaugeError, Backend
from anygauge.registry import Registry
from anygauge.training.checks import check_settings
from anygauge.training.strategy import check_batch, check_strategy

AUTO = "auto"


def candidates(
    run: RunFile, registry: Registry, backend: Backend, ranks: int, *, ranks_run_here: bool
) -> list[RunFile]:
    """The run with each of the strategies that it may have, the fastest first.

    Args:
        ranks_run_here: see `check_strategy`.
    """
    forms = [
        (form, provided.spec.name)
        for provided in registry.strategies
        for form in provided.spec.auto
        if ranks > 1 or form.alone
    ]
    found = []
    for form, name in sorted(forms, key=lambda one: (one[0].place, one[1])):
        section = section_of(name).model_validate({**form.options, "name": name})
        candidate = run.model_copy(update={"strategy": section})
        try:
            check_strategy(candidate, registry, backend, ranks, ranks_run_here=ranks_run_here)
            check_batch(candidate, registry, ranks)
            check_settings(candidate, backend, registry, ranks_run_here=ranks_run_here)
        except AnygaugeError:
            continue  # what it cannot do, another can
        found.append(candidate)
    return found


def in_words(run: RunFile) -> str:
    """A candidate's strategy as the run says it."""
    section = run.strategy
    told = [f"{name}: {getattr(section, name)}" for name in section.model_fields_set - {"name"}]
    return section.name + (f" with {', '.join(sorted(told))}" if told else "")
