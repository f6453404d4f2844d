"""What plugins provide, by kind, and what became of each plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pluggy

from anygauge.interface import (
    BackendSpec,
    KernelSpec,
    LauncherSpec,
    ObjectiveSpec,
    OptimizerSpec,
    StrategySpec,
    TrackerSpec,
)

BLOCK_VARIABLE = "ANYGAUGE_BLOCK_PLUGINS"
"""Comma-separated names of entry points or distributions that are not loaded."""

AUTO = "auto"
"""The name that asks for a choice; no backend may bear it."""

AnySpec = (
    BackendSpec
    | KernelSpec
    | LauncherSpec
    | ObjectiveSpec
    | OptimizerSpec
    | StrategySpec
    | TrackerSpec
)
SpecT = TypeVar("SpecT", bound=AnySpec)

KINDS: Mapping[str, tuple[str, type[AnySpec]]] = {
    "anygauge_provide_backends": ("backend", BackendSpec),
    "anygauge_provide_kernels": ("kernel", KernelSpec),
    "anygauge_provide_launchers": ("launcher", LauncherSpec),
    "anygauge_provide_objectives": ("objective", ObjectiveSpec),
    "anygauge_provide_optimizers": ("optimizer", OptimizerSpec),
    "anygauge_provide_strategies": ("strategy", StrategySpec),
    "anygauge_provide_trackers": ("tracker", TrackerSpec),
}
"""Hook -> what it provides."""
TUNING_HOOK = "anygauge_tune_environment"
HOOK_NAMES = (*KINDS, TUNING_HOOK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """An entry point, and the installed distribution that has it."""

    distribution: str
    version: str
    entry_point: str = ""

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Provided(Plugin, Generic[SpecT]):
    """A spec, and the plugin that gave it."""

    spec: SpecT

    @property
    def kind(self) -> str:
        """A word of `KINDS`, such as ``backend``."""
        return next(kind for kind, spec in KINDS.values() if isinstance(self.spec, spec))

    @property
    def title(self) -> str:
        """Kind, name, distribution and version, for messages."""
        return f"{self.kind} {self.spec.name!r} of {self.origin}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """One name that several plugins claim; none of them gets it.

    Attributes:
        kind: see `Provided.kind`.
        name: the name; for a kernel, ``operation/name``.
    """

    kind: str
    name: str
    providers: tuple[Provided[Any], ...]

    @property
    def reason(self) -> str:
        """Who claims the name, and what to do."""
        claims = " and ".join(f"{p.origin} (plugin {p.entry_point!r})" for p in self.providers)
        return (
            f"{self.kind} {self.name!r} is provided by {claims}; uninstall all but one, or name "
            f"the plugins to skip in {BLOCK_VARIABLE}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginFailure(Plugin):
    """A plugin that was found and could not be loaded, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedPlugin(Plugin):
    """A plugin that was skipped because the user's `BLOCK_VARIABLE` names it."""

    blocked_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlugin(Plugin):
    """A plugin that passed every check.

    Attributes:
        manager: knows this plugin alone; calls its hooks.
        provided: all that it announced, of every kind.
    """

    manager: pluggy.PluginManager
    provided: tuple[Provided[Any], ...]
