"""What all sections of a run file share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**31 - 1
"""Of counts. It is not a setting that anyone wants: beyond it, products of two counts overflow."""

LARGEST_NUMBER = 1e6
"""Of factors, rates and repetitions. A rate of a million moves every weight beyond all use."""

LARGEST_BATCH = 2**20
"""Sequences of one step: each step lists where all of its rows stand."""

LONGEST_S = 1e6
"""Seconds that can be waited: eleven days. Libraries count milliseconds in 32 bits."""

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
BatchSize = Annotated[int, Field(gt=0, le=LARGEST_BATCH)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
