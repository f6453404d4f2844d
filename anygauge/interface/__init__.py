"""The contract between the portable core and its plugins; imports no torch."""

from anygauge.interface.backend import (
    API_VERSION,
    CAPABILITIES,
    Backend,
    BackendSpec,
    Check,
    LaunchProfile,
    Outcome,
    Requirement,
)
from anygauge.interface.collectives import Collectives
from anygauge.interface.errors import (
    AnygaugeError,
    DataError,
    ModelError,
    NonFiniteLossError,
    NotAvailableError,
    PluginError,
    RankFailedError,
    RunFileError,
    UnsupportedError,
)
from anygauge.interface.graph import Compiler, Graph, Phase, ShapeKind, ShapePolicy
from anygauge.interface.hooks import hookimpl
from anygauge.interface.job import Job, NetworkInterface, Node, RdmaDevice
from anygauge.interface.placement import HOST_DEVICE, MemoryStats, PeakFlops, Placement
from anygauge.interface.plugins import (
    KernelSpec,
    Launcher,
    LauncherSpec,
    Plan,
    PlannedFile,
    PlannedProcess,
    RunningJob,
    Tracker,
    TrackerSpec,
)
from anygauge.interface.probe import Finding, Presence, Probe
from anygauge.interface.settings import Scope, Setting
from anygauge.interface.support import FULL, Level, Support

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "FULL",
    "HOST_DEVICE",
    "AnygaugeError",
    "Backend",
    "BackendSpec",
    "Check",
    "Collectives",
    "Compiler",
    "DataError",
    "Finding",
    "Graph",
    "Job",
    "KernelSpec",
    "LaunchProfile",
    "Launcher",
    "LauncherSpec",
    "Level",
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
    "RankFailedError",
    "RdmaDevice",
    "Requirement",
    "RunFileError",
    "RunningJob",
    "Scope",
    "Setting",
    "ShapeKind",
    "ShapePolicy",
    "Support",
    "Tracker",
    "TrackerSpec",
    "UnsupportedError",
    "hookimpl",
]
