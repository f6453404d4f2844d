"""A setting: one variable or one field of an engine's configuration, with its provenance."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Scope(enum.Enum):
    """Where a setting's value is the same: in the whole job, on one node, or in one rank only."""

    JOB = "job"
    NODE = "node"
    RANK = "rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One proposed value.

    Attributes:
        name: an environment variable, or a dotted field of an engine's configuration.
        value: always a string for the environment; any JSON value for an engine. ``None``
            in the environment means: remove the variable.
        scope: where the value holds.
        reason: why it is set, in one line.
        source: where that is documented or derived.
        secret: never shown or stored by value.
    """

    name: str
    value: Any
    scope: Scope = Scope.JOB
    reason: str
    source: str
    secret: bool = False
