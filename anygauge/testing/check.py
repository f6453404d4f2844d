"""Defines a check: a question to a backend, its subject, and the verdict on it."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from anygauge.interface import Backend, Level, StrategySpec, Support
from anygauge.util.section import first_complaint

if TYPE_CHECKING:
    import torch

BACKEND_VARIABLE = "ANYGAUGE_CONFORMANCE_BACKEND"
"""Passes the name of ``--anygauge-backend`` to the contract."""
CHOSEN_STRATEGY = "ANYGAUGE_CONFORMANCE_STRATEGY"
"""Likewise, of ``--anygauge-strategy``."""
TABLE_S = 240.0
"""Seconds that a check may take that goes through a table."""
COLLECTIVE_TIMEOUT_S = 60.0
"""How long the collectives of the kit's ranks may wait."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest error of one operation relative to the largest value, by compute type."""
PASSED, SKIPPED, DECLARED, FAILED = BEST_FIRST = "passed", "skipped", "declared", "failed"
"""What becomes of a check: it holds; it has no meaning for the backend; it does not hold, as the
backend declares; or it fails."""
Verdict = tuple[str, str]
"""One of these, and why."""


def sharding_spec() -> StrategySpec:
    """The strategy that is tried most: of the installed ones that shard, the last for `auto`."""
    from anygauge.registry import Registry, missing_of

    forms = [
        (form.place, provided.spec.name, provided.spec)
        for provided in Registry.load().strategies
        for form in provided.spec.hints.auto
        if not (form.alone or form.options or missing_of(provided.spec))
    ]
    return max(forms)[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceCheck:
    """One question to a backend.

    Attributes:
        name: short and stable, such as ``memory_moves``.
        title: what holds if it passes, in words.
        part: where it is asked: ``basic``, ``device``, ``operators`` or ``ranks``.
        function: gets what the part is about (`Paper`, `Device`, `RankContext`); raises where
            it does not hold.
        means: what users would see if it fails, and where vendors usually have the cause: one
            sentence.
        capability: what it tests; None where every backend must pass.
        of_the_end: it is about how the part's processes ended: its function gets a description of
            that, empty if all was in order.
        of_the_close: it is asked after the backend was closed, and gets its `ProcessState`.
        limit_s: seconds after which it counts as hanging; its part then ends.
    """

    name: str
    title: str
    part: str
    function: Callable[[Any], None]
    means: str = ""
    capability: str | None = None
    of_the_end: bool = False
    of_the_close: bool = False
    limit_s: float = 60.0


class SkipCheck(Exception):
    """Raised by a check that has no meaning for this backend; its message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the checks on a device get: an opened backend, and how to make another like it."""

    backend: Backend
    device: torch.device
    fresh: Callable[[], Backend]

    @property
    def placement(self) -> Any:
        """The backend's."""
        return self.backend.placement


PROGRESS: list[Callable[[str], None]] = []
"""Show a line while the kit runs: what it is at. The pytest plugin adds one."""


def progress(text: str) -> None:
    """Say what is being tried, such as ``cpu on 2 ranks: broadcast``."""
    for show in PROGRESS:
        show(text)


CHECKS: dict[str, ConformanceCheck] = {}
"""Every check by name, in the order of definition; its part's module registers it when imported."""


def check(
    title: str, *, name: str = "", **fields: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Decorator: register a function as a check, under its own name unless another is given.

    Args:
        fields: the others of `ConformanceCheck`.
    """

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        of = name or function.__name__
        if of in CHECKS:
            raise ValueError(f"two checks are named {of!r}")
        CHECKS[of] = ConformanceCheck(name=of, title=title, function=function, **fields)
        return function

    return register


def run_check(function: Callable[[Any], None], subject: Any, declared: Support | None) -> Verdict:
    """Run a check's function and return its verdict.

    A capability that is declared and fails is a failure, and so is one that is declared missing
    and works: users are refused what they could have; unless an option of theirs refuses it.

    Args:
        declared: of the check's capability; None where every backend must pass.
    """
    try:
        function(subject)
    except SkipCheck as reason:
        return SKIPPED, str(reason)
    except Exception as error:
        if declared is not None and not declared:
            return DECLARED, str(declared)
        traceback.print_exc()
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not isinstance(error, AssertionError):
            detail = f"{type(error).__name__}: {detail}"
        return FAILED, detail if declared is None else f"{detail} (declared: {declared})"
    if declared is None or declared:
        return PASSED, ""
    if declared.level is Level.SWITCHED_OFF:
        return DECLARED, str(declared)
    return FAILED, f"declared as {declared}, but it works"


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several, such as those of ranks; the first if others are as bad."""
    return max(verdicts, key=lambda each: BEST_FIRST.index(each[0]))


def of_type(what: str, value: Any, hint: Any) -> None:
    """Fail unless a value has a type; of a dataclass of the contract, each of its fields.

    Args:
        what: the value in words.
        hint: nothing is converted: a tuple of texts is neither a list of them nor a text.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        assert isinstance(value, hint), f"{what}: a {type(value).__name__}, not a {hint.__name__}"
        for name, each in get_type_hints(hint).items():
            of_type(f"{what}.{name}", getattr(value, name), each)
        return
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise AssertionError(f"{what} is {value!r}: {first_complaint(error)}") from None
