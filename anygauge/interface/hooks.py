"""The hooks. A plugin implements some of them with `hookimpl` in a module named by an entry point.

In ``pyproject.toml``::

    [project.entry-points.anygauge]
    mine = "anygauge_mine"

Discovery is all that a hook does; what it returns is used as plain objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

from anygauge.interface.settings import Setting

if TYPE_CHECKING:
    from anygauge.interface.backend import Backend, BackendSpec
    from anygauge.interface.job import Job, Node
    from anygauge.interface.plugins import KernelSpec, LauncherSpec, TrackerSpec

PROJECT = "anygauge"
ENTRY_POINT_GROUP = "anygauge"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def anygauge_provide_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Announce devices. Imports no torch."""


@hookspec
def anygauge_provide_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Announce implementations of operations. Imports no torch."""


@hookspec
def anygauge_provide_launchers() -> Iterable[LauncherSpec]:  # type: ignore[empty-body]
    """Announce ways to start a job on one or many machines."""


@hookspec
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:  # type: ignore[empty-body]
    """Announce receivers of metrics."""


@hookspec
def anygauge_tune_environment(  # type: ignore[empty-body]
    backend: Backend, job: Job, node: Node, settings: Sequence[Setting]
) -> Iterable[Setting]:
    """A site adds or changes variables: what is returned wins over the backend's of that name."""
