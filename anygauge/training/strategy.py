"""The strategy of a run: what is refused of it, by a dry run as by a rank, and its making."""

from __future__ import annotations

from anygauge.config.precision import resolve_precision
from anygauge.config.schema import RunFile
from anygauge.interface import (
    Backend,
    RunFileError,
    Strategy,
    StrategyRun,
    StrategySpec,
    UnsupportedError,
)
from anygauge.registry import Registry


def check_ranks(spec: StrategySpec, world_size: int, registry: Registry) -> None:
    """Refuse a number of ranks that a strategy does not run on.

    Raises:
        RunFileError: names numbers, and strategies, that would do.
    """
    if not spec.world_sizes or world_size in spec.world_sizes:
        return
    others = [
        each.spec.name
        for each in registry.strategies
        if not each.spec.world_sizes or world_size in each.spec.world_sizes
    ]
    sizes = " or ".join(map(str, spec.world_sizes))
    alone = spec.world_sizes == (1,)
    raise RunFileError(
        f"strategy.name: {spec.name!r} trains in {'one process' if alone else f'{sizes} ranks'}, "
        f"but {world_size} ranks are asked for; "
        + ("use --devices 1 and --nodes 1" if alone else f"make --devices times --nodes {sizes}")
        + (f", or strategy.name: {' or '.join(others)}" if others else "")
    )


def check_backend(spec: StrategySpec, backend: Backend) -> None:
    """Refuse a device that lacks what a strategy needs.

    Raises:
        UnsupportedError: quotes the backend's reason.
    """
    for need in spec.needs:
        support = backend.support(need.capability)
        if not support:
            raise UnsupportedError(
                f"backend {backend.name!r} lacks {need.capability!r}, needed because "
                f"{need.because}: {support}"
            )
    if spec.engine in backend.unsupported_engines:
        raise UnsupportedError(
            f"backend {backend.name!r} cannot run {spec.engine!r}, the engine of strategy "
            f"{spec.name!r}: {backend.unsupported_engines[spec.engine]}"
        )


def check_strategy(
    run: RunFile,
    registry: Registry,
    backend: Backend,
    world_size: int,
    *,
    ranks_run_here: bool = True,
) -> None:
    """Refuse all that is known to fail before a device is opened.

    Args:
        ranks_run_here: whether packages of this machine are those of the ranks.

    Raises:
        AnygaugeError: says what the strategy cannot do, and what to change.
    """
    spec = registry.find_strategy(run.strategy.name).spec
    check_ranks(spec, world_size, registry)
    precision = None
    if run.precision.param_dtype != "auto":
        precision = resolve_precision(run.precision, backend.support)
    spec.check(
        StrategyRun(
            options=run.strategy,
            world_size=world_size,
            optimizer=run.train.optimizer.name,
            precision=precision,
            ranks_run_here=ranks_run_here,
        )
    )
    check_backend(spec, backend)


def create_strategy(registry: Registry, run: RunFile) -> Strategy:
    """The strategy that a run file names.

    Raises:
        PluginError: its plugin is broken.
    """
    return registry.strategy(run.strategy.name)(run.strategy)
