"""Announces the strategy `plain`; imports neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import StrategyRun, StrategySpec, UnsupportedError, hookimpl


def refuse_other_types(run: StrategyRun) -> None:
    """Raises: UnsupportedError: weights are wanted in another type than float32."""
    if run.precision is not None and run.precision.param_dtype != "float32":
        raise UnsupportedError(
            f"precision.param_dtype: strategy plain computes in float32, not in "
            f"{run.precision.param_dtype}; set precision.param_dtype: float32"
        )


@hookimpl
def anygauge_provide_strategies() -> Iterable[StrategySpec]:
    """Announce it."""
    return [
        StrategySpec(
            name="plain",
            factory="anygauge_plain.engine:Plain",
            options="anygauge_plain.options:PlainOptions",
            api_version=1,
            summary="The whole model in one process, in float32.",
            single_process=True,
            check=refuse_other_types,
        )
    ]
