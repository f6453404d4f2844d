"""The backend of the host's own processors."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import BackendSpec, hookimpl
from anygauge_cpu.probe import probe, this_machine

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    """Announce the backend."""
    return [
        BackendSpec(
            name="cpu",
            factory="anygauge_cpu.backend:CpuBackend",
            options="anygauge_cpu.backend:CpuOptions",
            probe=probe,
            api_version=WRITTEN_FOR,
            priority=0,
            drives="this machine's processors",
            hardware="anygauge_cpu:device.toml",
            this_machine=this_machine,
        )
    ]
