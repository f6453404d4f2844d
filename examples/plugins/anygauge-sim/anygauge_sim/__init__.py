"""Simulated accelerator cards as an anygauge backend: ``--backend sim``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from anygauge.interface import BackendSpec, hookimpl
from anygauge_sim import settings
from anygauge_sim.probe import probe

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    """Announce the backend."""
    return [
        BackendSpec(
            name="sim",
            factory="anygauge_sim.backend:SimBackend",
            probe=probe,
            api_version=WRITTEN_FOR,
            priority=-100,  # only for whoever asks for it by name
            drives="simulated cards, for tests",
            hardware="anygauge_sim:device.toml",
            this_machine=this_machine,
        )
    ]


def this_machine() -> Mapping[str, float]:
    """What device.toml leaves to the machine at hand."""
    return {"memory": settings.read(os.environ).capacity}
