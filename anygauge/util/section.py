"""What all that is read by pydantic shares: sections of run files, bounds, words for complaints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from anygauge.util.text import shorten

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
    """Where and what, of a record that a program has written; a missing field comes before others.

    ``'launch.port': Input should be a valid integer``; no value is repeated.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(found, key=lambda one: one["type"] != "missing")
    place = repr(shorten(".".join(map(str, first["loc"]))))
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place} is unknown"
    return f"{place}: {first['msg']}" if first["loc"] else first["msg"]
