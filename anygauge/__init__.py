"""anygauge: one LLM fine-tuning loop for any accelerator; importing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anygauge.util.forks  # noqa: F401 - it notices forks from here on

if TYPE_CHECKING:
    from anygauge.cli.from_python import Result, load, plan, train
    from anygauge.config.schema import RunFile
    from anygauge.interface import AnygaugeError, Backend

    __version__: str

__all__ = [
    "AnygaugeError",
    "Result",
    "RunFile",
    "__version__",
    "load",
    "open_backend",
    "plan",
    "train",
]

_HOMES = {
    **dict.fromkeys(("Result", "load", "plan", "train"), "anygauge.cli.from_python"),
    "AnygaugeError": "anygauge.util.errors",
    "RunFile": "anygauge.config.schema",
}
"""Name -> the module that it is imported from when it is first used."""


def open_backend(
    name: str = "auto",
    *,
    local_rank: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Backend:
    """Choose a backend and open its device, for a training loop of one's own.

    Use it as a context manager, or call ``close()`` at the end::

        with anygauge.open_backend() as backend:
            model.to(backend.placement.device)

    The environment variables that the backend would like to see before torch is imported are
    not set: that is the launcher's work, and this process runs already.

    Args:
        name: a backend's name, or ``auto`` for the best that this machine offers.
        local_rank: which of the machine's devices to take, from 0.
        options: the backend's own options, as in a run file's ``backend_options``.

    Returns:
        The backend, with its device open.

    Raises:
        PluginError: there is no such backend, or it is broken.
        NotAvailableError: it cannot run on this machine; the message says what is missing.
    """
    from anygauge.registry import Registry, select_backend

    registry = Registry.load()
    backend = registry.create_backend(select_backend(registry, name).spec.name, options)
    backend.open(local_rank)
    return backend


def __getattr__(name: str) -> Any:
    # Reading an installed distribution's metadata takes longer than all the rest of this import.
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("anygauge")
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
