"""What all that is read by pydantic shares: sections of run files, bounds, words for complaints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

LARGEST = 2**31 - 1
"""Of counts. It is not a setting that anyone wants: beyond it, products of two counts overflow."""

LARGEST_NUMBER = 1e6
"""Of factors, rates and repetitions. A rate of a million moves every weight beyond all use."""

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
# Each step lists where all of its rows stand.
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
# Eleven days: libraries count milliseconds in 32 bits.
Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _without_nulls(given: Any) -> Any:
    is_mapping = isinstance(given, dict)
    return {k: v for k, v in given.items() if v is not None} if is_mapping else given


NULLS_REMOVED = BeforeValidator(_without_nulls)
"""Of mappings whose names no section knows: a null removes what the base or the file has there."""

Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
"""Of records from other machines and from checkpoints: nothing is converted, all is bounded."""


def first_complaint(error: ValidationError) -> str:
    """Where and what: ``launch.port: Input should be a valid integer``; no value is repeated."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


def first_fault(error: ValidationError) -> tuple[str, str, Any]:
    """(where, what, value): the first fault of a record; a missing field comes before others.

    What is ``missing``, ``unknown`` or ``wrong``.
    """
    found = error.errors(include_url=False, include_context=False)
    first = min(found, key=lambda one: one["type"] != "missing")
    kinds = {"extra_forbidden": "unknown", "unexpected_keyword_argument": "unknown"}
    kind = "missing" if first["type"] == "missing" else kinds.get(first["type"], "wrong")
    return ".".join(map(str, first["loc"])), kind, first["input"]
