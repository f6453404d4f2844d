"""The conformance kit: what a backend must hold, as tests that its author runs.

``pytest --anygauge-backend NAME`` runs it on an installed backend; ``BackendContract`` is the same
as a class to derive from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge.testing.contract import BackendContract

__all__ = ["BackendContract"]


def __getattr__(name: str) -> Any:
    if name == "BackendContract":  # imports pytest and torch
        from anygauge.testing.contract import BackendContract

        return BackendContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
