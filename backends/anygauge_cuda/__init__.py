"""The backend of NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import BackendSpec, hookimpl
from anygauge_cuda.probe import probe

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    """Announce the backend."""
    return [
        BackendSpec(
            name="cuda",
            factory="anygauge_cuda.backend:CudaBackend",
            options="anygauge_cuda.backend:CudaOptions",
            probe=probe,
            api_version=WRITTEN_FOR,
            priority=100,
            drives="NVIDIA GPUs",
            hardware="anygauge_cuda:device.toml",
        )
    ]
