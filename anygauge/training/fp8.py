"""What products in FP8 need of a run and of a device, checked before anything loads; no torch."""

from __future__ import annotations

from anygauge.config.schema import RunFile
from anygauge.interface import Backend, StrategySpec, UnsupportedError
from anygauge.models.start import whole_modules

CAPABILITY = "fp8_products"


def check_fp8(run: RunFile, spec: StrategySpec, backend: Backend) -> None:
    """Refuse ``precision.fp8`` where it cannot work, or where nobody has tried it.

    Raises:
        UnsupportedError: quotes the reason of the backend or strategy, or names what does not go
            with it.
    """
    if not run.precision.fp8:
        return
    support = backend.support(CAPABILITY)
    if not support:
        raise UnsupportedError(
            f"precision.fp8: backend {backend.name!r} lacks {CAPABILITY!r}: {support}. With "
            "precision.fp8: false, linear layers multiply in precision.param_dtype"
        )
    taken = spec.takes_fp8(run.strategy)
    if not taken:
        raise UnsupportedError(
            f"precision.fp8: strategy {spec.name!r}: {taken}. Use strategy.name: zero without "
            "offload, or single; or set precision.fp8: false"
        )
    for field, used, why in (
        (
            "model.quantise",
            run.model.quantise is not None,
            "quantised layers hold codes and multiply by a library of their own",
        ),
        (
            "adapter.dora",
            run.adapter is not None and run.adapter.dora,
            "DoRA computes norms of whole weights, which nobody has tried with converted layers",
        ),
        (
            "adapter.modules_to_save",
            bool(whole_modules(run.adapter)),
            "each such module has a copy beside it, which nobody has tried to convert",
        ),
    ):
        if used:
            raise UnsupportedError(
                f"precision.fp8 and {field}: {why}. Leave {field} out, or set precision.fp8: false"
            )
