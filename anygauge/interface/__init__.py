"""The contract between the portable core and its plugins; imports no torch.

Names are imported when they are first used, so that a command pays only for what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge.interface.backend import (
        API_VERSION,
        CAPABILITIES,
        Backend,
        BackendSpec,
        Check,
        Outcome,
        Requirement,
    )
    from anygauge.interface.collectives import Collectives
    from anygauge.interface.common_rules import (
        ONE_NODE,
        THREADS,
        meeting_interface,
        others_up,
    )
    from anygauge.interface.errors import (
        LOST,
        STOPPED,
        AnygaugeError,
        DataError,
        ModelError,
        NonFiniteLossError,
        NotAvailableError,
        PluginError,
        RunFileError,
        UnsupportedError,
    )
    from anygauge.interface.fabric import (
        ETHERNET,
        ChosenFabric,
        Fabric,
        missing_fabric,
        named_fabric,
        shown_by,
    )
    from anygauge.interface.graph import Compiler, Graph, Phase, ShapeKind, ShapePolicy
    from anygauge.interface.hooks import hookimpl
    from anygauge.interface.job import Job, NetworkInterface, Node, RdmaDevice
    from anygauge.interface.kernels import AttentionKernel, LoraKernel
    from anygauge.interface.placement import HOST_DEVICE, MemoryStats, PeakFlops, Placement
    from anygauge.interface.plugins import (
        ABILITIES,
        KernelSpec,
        Launcher,
        LauncherSpec,
        Plan,
        PlannedFile,
        PlannedProcess,
        RunningJob,
        RunStatus,
        Tracker,
        TrackerContext,
        TrackerOption,
        TrackerSpec,
    )
    from anygauge.interface.probe import Finding, Presence, Probe
    from anygauge.interface.profile import LaunchProfile
    from anygauge.interface.rules import Decision, EnvironmentRule, Situation, leave, use
    from anygauge.interface.settings import Scope, Setting
    from anygauge.interface.support import FULL, Level, Support

__all__ = [
    "ABILITIES",
    "API_VERSION",
    "CAPABILITIES",
    "ETHERNET",
    "FULL",
    "HOST_DEVICE",
    "LOST",
    "ONE_NODE",
    "STOPPED",
    "THREADS",
    "AnygaugeError",
    "AttentionKernel",
    "Backend",
    "BackendSpec",
    "Check",
    "ChosenFabric",
    "Collectives",
    "Compiler",
    "DataError",
    "Decision",
    "EnvironmentRule",
    "Fabric",
    "Finding",
    "Graph",
    "Job",
    "KernelSpec",
    "LaunchProfile",
    "Launcher",
    "LauncherSpec",
    "Level",
    "LoraKernel",
    "MemoryStats",
    "ModelError",
    "NetworkInterface",
    "Node",
    "NonFiniteLossError",
    "NotAvailableError",
    "Outcome",
    "PeakFlops",
    "Phase",
    "Placement",
    "Plan",
    "PlannedFile",
    "PlannedProcess",
    "PluginError",
    "Presence",
    "Probe",
    "RdmaDevice",
    "Requirement",
    "RunFileError",
    "RunStatus",
    "RunningJob",
    "Scope",
    "Setting",
    "ShapeKind",
    "ShapePolicy",
    "Situation",
    "Support",
    "Tracker",
    "TrackerContext",
    "TrackerOption",
    "TrackerSpec",
    "UnsupportedError",
    "hookimpl",
    "leave",
    "meeting_interface",
    "missing_fabric",
    "named_fabric",
    "others_up",
    "shown_by",
    "use",
]

_HOMES = {
    "ABILITIES": "plugins",
    "API_VERSION": "backend",
    "AnygaugeError": "errors",
    "AttentionKernel": "kernels",
    "LOST": "errors",
    "STOPPED": "errors",
    "Backend": "backend",
    "BackendSpec": "backend",
    "CAPABILITIES": "backend",
    "Check": "backend",
    "Collectives": "collectives",
    "Compiler": "graph",
    "DataError": "errors",
    "Decision": "rules",
    "FULL": "support",
    "ONE_NODE": "common_rules",
    "THREADS": "common_rules",
    "meeting_interface": "common_rules",
    "others_up": "common_rules",
    "EnvironmentRule": "rules",
    "Finding": "probe",
    "Graph": "graph",
    "HOST_DEVICE": "placement",
    "Job": "job",
    "KernelSpec": "plugins",
    "LaunchProfile": "profile",
    "Launcher": "plugins",
    "LauncherSpec": "plugins",
    "Level": "support",
    "LoraKernel": "kernels",
    "MemoryStats": "placement",
    "ModelError": "errors",
    "NetworkInterface": "job",
    "Node": "job",
    "NonFiniteLossError": "errors",
    "NotAvailableError": "errors",
    "Outcome": "backend",
    "PeakFlops": "placement",
    "Phase": "graph",
    "Placement": "placement",
    "Plan": "plugins",
    "PlannedFile": "plugins",
    "PlannedProcess": "plugins",
    "PluginError": "errors",
    "Presence": "probe",
    "Probe": "probe",
    "RdmaDevice": "job",
    "ETHERNET": "fabric",
    "ChosenFabric": "fabric",
    "Fabric": "fabric",
    "missing_fabric": "fabric",
    "named_fabric": "fabric",
    "shown_by": "fabric",
    "Requirement": "backend",
    "RunFileError": "errors",
    "RunStatus": "plugins",
    "RunningJob": "plugins",
    "Scope": "settings",
    "Setting": "settings",
    "ShapeKind": "graph",
    "ShapePolicy": "graph",
    "Situation": "rules",
    "Support": "support",
    "Tracker": "plugins",
    "TrackerContext": "plugins",
    "TrackerOption": "plugins",
    "TrackerSpec": "plugins",
    "UnsupportedError": "errors",
    "hookimpl": "hooks",
    "leave": "rules",
    "use": "rules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
