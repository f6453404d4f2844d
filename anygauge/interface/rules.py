"""Rules of an environment: which variable a backend sets in which situation, and why.

A backend states its rules as a table. What a run gets, what ``anygauge env --explain`` shows and
what the documentation lists are all made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anygauge.interface.fabric import NO_FABRIC, ChosenFabric
from anygauge.interface.job import Job, Node
from anygauge.interface.settings import Scope, Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """All that a rule may read.

    Attributes:
        local_rank: whose environment is asked for; None for what the whole node shares.
        fabric: the network between the machines of the job.
    """

    job: Job
    node: Node
    local_rank: int | None = None
    fabric: ChosenFabric = NO_FABRIC

    @property
    def options(self) -> Mapping[str, Any]:
        """The run file's ``backend_options``."""
        return self.job.backend_options

    def variable(self, name: str) -> str | None:
        """What the user, or else the run file, sets for a variable of `Backend.variables`."""
        return self.node.variables.get(name, self.job.environment.get(name))

    def version(self, library: str) -> tuple[int, int]:
        """``2.9.0+cu128`` is (2, 9); (0, 0) where the library is not installed or unreadable."""
        major, _, rest = self.node.libraries.get(library, "").partition(".")
        minor = rest.partition(".")[0]
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule decides in a situation.

    Attributes:
        value: the variable's value; None removes it.
        why: in one line, also where it does not apply.
        applies: whether the variable is touched at all.
    """

    value: str | None
    why: str
    applies: bool = True


def use(value: str, why: str) -> Decision:
    """Give the variable this value."""
    return Decision(value, why)


def leave(why: str) -> Decision:
    """Do not touch the variable here."""
    return Decision(None, why, applies=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRule:
    """One variable and how its value comes about.

    Attributes:
        name: the variable.
        value: the rule in words, for tables: ``1 in lazy mode, else 0``.
        scope: where the value is the same. Rules of `Scope.RANK` are asked for ranks only.
        reason: why it is set at all.
        source: where that is documented.
        decide: pure; what to do in a situation.
    """

    name: str
    value: str
    scope: Scope
    reason: str
    source: str
    decide: Callable[[Situation], Decision]

    def setting(self, decision: Decision) -> Setting:
        """The rule's decision as a setting."""
        return Setting(
            name=self.name,
            value=decision.value,
            scope=self.scope,
            reason=decision.why,
            source=self.source,
        )
