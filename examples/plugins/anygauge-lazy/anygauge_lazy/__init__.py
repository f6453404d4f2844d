"""PyTorch's lazy-tensor device as an anygauge backend: ``--backend lazy``."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import BackendSpec, hookimpl
from anygauge_lazy.probe import probe

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    """Announce the backend."""
    return [
        BackendSpec(
            name="lazy",
            factory="anygauge_lazy.backend:LazyBackend",
            options="anygauge_lazy.options:LazyOptions",
            probe=probe,
            api_version=WRITTEN_FOR,
            priority=-100,  # only for whoever asks for it by name
            drives="PyTorch's lazy-tensor device, for tests",
        )
    ]
