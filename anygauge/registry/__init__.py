"""Finds plugins, chooses among them and explains the choice; imports no torch."""

from anygauge.registry.load_plugins import AUTO, BLOCK_VARIABLE, PluginFailure, Provided
from anygauge.registry.registry import Registry, installed_plugins, missing_of
from anygauge.registry.resolve_environment import (
    ResolvedSetting,
    apply_settings,
    resolve_environment,
)
from anygauge.registry.selection import Selection, select_backend

__all__ = [
    "AUTO",
    "BLOCK_VARIABLE",
    "PluginFailure",
    "Provided",
    "Registry",
    "ResolvedSetting",
    "Selection",
    "apply_settings",
    "installed_plugins",
    "missing_of",
    "resolve_environment",
    "select_backend",
]
