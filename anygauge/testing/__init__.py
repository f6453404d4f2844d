"""The conformance kit: what a backend must hold, as tests that its author runs.

``pytest --anygauge-backend NAME`` runs it on an installed backend; ``BackendContract`` is the same
as a class to derive from. The kit's version is that of the contract, `KIT_VERSION`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anygauge.interface import API_VERSION as KIT_VERSION

if TYPE_CHECKING:
    from anygauge.testing.contract import BackendContract

__all__ = ["KIT_VERSION", "BackendContract"]


def __getattr__(name: str) -> Any:
    if name == "BackendContract":  # imports pytest and torch
        from anygauge.testing.contract import BackendContract

        return BackendContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
