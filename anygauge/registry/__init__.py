"""Finds plugins, chooses among them and explains the choice; imports no torch."""

from anygauge.registry.environment import (
    ResolvedSetting,
    applied,
    resolve_environment,
    shown_overruled,
    shown_value,
)
from anygauge.registry.kernels import REFERENCE, KernelChoice
from anygauge.registry.plugins import (
    AUTO,
    BLOCK_VARIABLE,
    BlockedPlugin,
    PluginFailure,
    Provided,
)
from anygauge.registry.registry import Duplicate, Registry
from anygauge.registry.selection import Selection, questions

__all__ = [
    "AUTO",
    "BLOCK_VARIABLE",
    "REFERENCE",
    "BlockedPlugin",
    "Duplicate",
    "KernelChoice",
    "PluginFailure",
    "Provided",
    "Registry",
    "ResolvedSetting",
    "Selection",
    "applied",
    "questions",
    "resolve_environment",
    "shown_overruled",
    "shown_value",
]
