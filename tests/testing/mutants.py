"""The plugin whose backend has one defect: a line of a table, which `ANYGAUGE_MUTATION` names.

Installed by the tests as a distribution of its own. Without a defect it is the host's processors
under another name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

from anygauge.interface import API_VERSION, Backend, BackendSpec, KernelSpec, hookimpl


@functools.cache
def wrong() -> Any:
    """What its line makes of a backend; the variable is read once, before checks change any."""
    from tests.testing.wrong import changed

    return changed(os.environ.get("ANYGAUGE_MUTATION", "none"))


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    fields: dict[str, Any] = {
        "name": "mutant",
        "factory": "anygauge_mutant:make",
        "options": "anygauge_cpu.backend:CpuOptions",
        "probe": wrong().probe,
        "api_version": API_VERSION,
        "priority": -1000,
    }
    return [BackendSpec(**{**fields, **wrong().announce()})]


@hookimpl
def anygauge_provide_kernels() -> Iterable[KernelSpec]:
    return [
        KernelSpec(
            operation=operation,
            name="mutant",
            factory="anygauge_mutant:kernel",
            api_version=API_VERSION,
        )
        for operation in wrong().kernels
    ]


def kernel() -> Any:
    """The factory of the only kernel."""
    (found,) = wrong().kernels.values()
    return found


def make(options: Any) -> Backend:
    found: Backend = wrong().backend(options)
    return found
