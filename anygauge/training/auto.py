"""Chooses what strategy `auto` becomes: the first other form that fits, whole models first.

Who prepares the run decides where it knows the devices (`anygauge.launch.memory_check`), and the
ranks decide where nobody did. Imports no torch before a rank decides.
"""

from __future__ import annotations

from anygauge.config.schema import RunFile, resolve_precision
from anygauge.config.strategies import StrategySection
from anygauge.interface import AnygaugeError, Backend, Job
from anygauge.registry import Registry
from anygauge.training.build_strategy import (
    check_batch,
    check_strategy,
    create_strategy,
    workload_of,
)
from anygauge.training.checks import check_settings

AUTO = "auto"
GIB = 2**30


def forms_of(run: RunFile, registry: Registry, ranks: int) -> list[RunFile]:
    """The run with each form that `auto` may take, the fastest first: alike on all machines that
    have the same plugins, whatever else they lack."""
    forms = [
        (form, provided.spec.name)
        for provided in registry.strategies
        for form in provided.spec.hints.auto
        if ranks > 1 or form.alone
    ]
    found = []
    for form, name in sorted(forms, key=lambda one: (one[0].place, one[1])):
        section = StrategySection.of_plugin(name).model_validate({**form.options, "name": name})
        found.append(run.model_copy(update={"strategy": section}))
    return found


def decided_before(run: RunFile, job: Job, registry: Registry) -> RunFile:
    """A run with the strategy that the job's first machine has decided, if it has.

    Raises:
        AnygaugeError: it means nothing here.
    """
    if run.strategy.name != AUTO or job.auto_form is None:
        return run
    forms = forms_of(run, registry, job.world_size)[job.auto_form :]
    if not forms or forms[0].strategy.name != job.strategy:
        raise AnygaugeError(
            f"the job's first machine has decided on strategy {job.strategy!r}, which is not the "
            "same here. Do all machines have the same version of anygauge, and the same plugins?"
        )
    return forms[0]


def candidates(
    run: RunFile, registry: Registry, backend: Backend, ranks: int, *, ranks_run_here: bool
) -> list[RunFile]:
    """Select those of `forms_of` that the run may have.

    Args:
        ranks_run_here: see `check_strategy`.

    Raises:
        AnygaugeError: it can have none; why it cannot have the first.
    """
    found = []
    refused: list[AnygaugeError] = []
    for candidate in forms_of(run, registry, ranks):
        try:
            check_strategy(candidate, registry, backend, ranks, ranks_run_here=ranks_run_here)
            check_batch(candidate, registry, ranks)
            check_settings(candidate, backend, registry, ranks_run_here=ranks_run_here)
        except AnygaugeError as error:
            refused.append(error)  # what it cannot do, another can
        else:
            found.append(candidate)
    if not found and refused:
        raise refused[0]
    return found


def in_words(run: RunFile) -> str:
    """Describe a candidate's strategy as a run file has it."""
    section = run.strategy
    fields = [f"{name}: {getattr(section, name)}" for name in section.model_fields_set - {"name"}]
    return section.name + (f" with {', '.join(sorted(fields))}" if fields else "")


def decide_strategy(
    run: RunFile, registry: Registry, backend: Backend, rank: int, world_size: int
) -> tuple[RunFile, str]:
    """A run with the strategy that `auto` is on these opened devices, and why; all ranks agree.

    What a rank would hold from step to step is compared with half of the smallest device's memory;
    the other half is for activations.

    Returns:
        A run that names another strategy as it is, and "".
    """
    if run.strategy.name != AUTO:
        return run, ""
    from anygauge.interface import estimate as at
    from anygauge.models.factory import CausalModelFactory
    from anygauge.strategies.shared.common import torch_dtype
    from anygauge.strategies.shared.footprint import memory_of

    precision = resolve_precision(run.precision, backend.support)
    factory = CausalModelFactory.of(run, torch_dtype(precision.param_dtype))
    skeleton = factory.adapt(factory.skeleton())
    memory = _least_memory(backend, world_size, run.launch.devices)
    forms = candidates(run, registry, backend, world_size, ranks_run_here=True)
    left_out: list[str] = []
    whole = 0
    for form in forms:
        workload = workload_of(form, registry, backend, precision, rank, world_size, skeleton)
        found = memory_of(create_strategy(registry, form), workload)
        weights = found.bytes_at(at.EVALUATION, at.WEIGHTS)
        gradients = max(found.bytes_at(moment, at.GRADIENTS) for moment in (at.BEGIN, at.UPDATE))
        whole_run = weights + gradients + found.bytes_at(at.EVALUATION, at.OPTIMIZER, at.BUFFERS)
        # What is offloaded is counted, too.
        stays = {"optimizer": weights, "both": 0}
        needed = stays.get(getattr(form.strategy, "offload", "none"), whole_run)
        whole = whole or needed
        if memory is None and (world_size == 1 or needed < whole):
            return form, "auto: the devices do not report how much memory they have"
        if memory is None:
            continue
        compared = f"{needed / GIB:.2f} GiB of the {memory / GIB:.1f} GiB that each rank has"
        if 2 * needed < memory:
            why = f"weights and optimizer take {compared}, less than half"
            return form, f"auto: {'; '.join([*left_out, why])}"
        left_out.append(f"{in_words(form)} would take {compared}")
    return forms[-1], f"auto: {'; '.join(left_out)}"


def _least_memory(backend: Backend, ranks: int, local_ranks: int) -> int | None:
    """What the smallest of all ranks has; those that share a host's have a part of it each.

    Args:
        local_ranks: on each machine.
    """
    stats = backend.placement.memory()
    mine = stats.limit
    if mine is not None and stats.kind == "process":
        mine //= local_ranks
    every = [mine] if ranks == 1 else backend.collectives.gather_objects(mine)
    return None if None in every else min(every)
