"""Products in FP8: when a backend converts a model for them, and what a step computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import BuildContext
from anygauge.strategies.shared.materialise import causal_of


@dataclass(frozen=True, slots=True)
class Fp8Contexts:
    """Make the context of a forward that trains, and that of its backward."""

    forward: Callable[[], contextlib.AbstractContextManager[Any]]
    backward: Callable[[], contextlib.AbstractContextManager[Any]]


PLAIN = Fp8Contexts(contextlib.nullcontext, contextlib.nullcontext)
"""Of a run without products in FP8."""


def fp8_contexts(
    model: nn.Module, context: BuildContext, *, reentrant: bool = False
) -> Fp8Contexts:
    """Have the backend convert a model, if the run asks for it, before an engine takes it.

    The output layer stays as it is: the loss multiplies with its weight, chunk by chunk, and calls
    no layer. Backward has a context where layers are computed again in it, as the products of both
    times must be the same.

    Args:
        model: with its adapter, on the device; layers already recompute as the run asks for.
        reentrant: by torch's older form, where they do.

    Raises:
        UnsupportedError: by the backend, with its reason.
    """
    if not context.workload.precision.fp8:
        return PLAIN
    head: Any = causal_of(model).get_output_embeddings()
    again = context.workload.activations.every > 0
    make = context.workload.backend.fp8_products(
        model, () if head is None else (head,), reentrant=reentrant if again else None
    )
    return Fp8Contexts(make, make if again else contextlib.nullcontext)
