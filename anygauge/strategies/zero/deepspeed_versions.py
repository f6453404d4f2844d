"""From which version on DeepSpeed does what, as tried here. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path

ENGINE = "deepspeed"
OFFLOADS_GRADIENTS_SINCE = (0, 19, 8)
"""First version here that trains as without offloading in stages 1 and 2; 0.16.9 does not."""

NON_REENTRANT_SINCE = (0, 19, 6)
"""First version whose ZeRO-3 keeps frozen weights whole in non-reentrant recomputation (#8148)."""

DISK_SINCE = (0, 19, 8)
"""First version here whose optimizer's state is read from a disk and written there as we do."""

SKIPS_NON_FINITE_SINCE = (0, 19, 8)
"""First version here that leaves out an update whose gradient is not finite, in every stage and
type; 0.16.9 does so in float16 alone."""


def skips_non_finite() -> bool:
    """Whether the installed DeepSpeed keeps gradients that are not finite from the weights."""
    return is_at_least(SKIPS_NON_FINITE_SINCE)


def offloads_gradients() -> bool:
    """Whether the installed DeepSpeed adds micro-batches up as it should while it offloads."""
    return is_at_least(OFFLOADS_GRADIENTS_SINCE)


def needs_reentrant_checkpointing() -> bool:
    """Whether the installed DeepSpeed loses frozen weights in non-reentrant recomputation."""
    return not is_at_least(NON_REENTRANT_SINCE)


def is_at_least(version: tuple[int, ...]) -> bool:
    """Whether the installed DeepSpeed is of this version or a later one."""
    try:
        words = metadata.version(ENGINE).split("+")[0].split(".")
    except metadata.PackageNotFoundError:
        return True  # a missing one is refused before
    return tuple(int(word) for word in words if word.isdigit())[:3] >= version


def parsed(path: str) -> ast.Module | None:
    """A file of the installed DeepSpeed, which takes seconds to import; None: it has none such."""
    package = importlib.util.find_spec(ENGINE)
    if package is None or package.origin is None:
        return None
    try:
        return ast.parse((Path(package.origin).parent / path).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
