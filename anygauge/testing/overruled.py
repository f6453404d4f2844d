"""A run on a backend that refuses the run's engine, made all the same: is the refusal true?

The run's backend is this module's: the one under test under another name, which refuses nothing. It
is found as any plugin is, so that command, agent and ranks do what they always do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge.interface import API_VERSION, Backend, BackendSpec, Probe, hookimpl
from anygauge.registry import Registry
from anygauge.testing.loop import RunFailed, train
from anygauge.testing.process import COLLECTIVE_TIMEOUT_S
from anygauge.testing.surroundings import Subject

NAME = "overruled"
VARIABLE = "ANYGAUGE_OVERRULED"
"""The backend under test."""


def losses_all_the_same(
    subject: Subject, folder: Path, strategy: str, ranks: int
) -> Sequence[float] | None:
    """The losses of every step of a run that would be refused; None if it fails all the same.

    Args:
        folder: `prepare` has filled it.
    """
    site = folder / "site"
    info = site / "anygauge_overruled-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: anygauge-overruled\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[anygauge]\n{NAME} = {__name__}\n")
    inherited = subject.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, [str(site), inherited]))
    environment = {**subject.environment, "PYTHONPATH": path, VARIABLE: subject.name}
    # A short limit: what is missing may well hang.
    launch = {"devices": ranks, "collective_timeout_s": COLLECTIVE_TIMEOUT_S}
    try:
        return train(
            replace(subject, environment=environment),
            folder,
            f"{NAME}-{strategy}{ranks}",
            strategy=strategy,
            ranks=ranks,
            dtype="float32",
            changes={"backend": NAME, "launch": launch},
        ).losses
    except (RunFailed, subprocess.TimeoutExpired):
        return None


# -- the plugin -----------------------------------------------------------------------------------


def probe() -> Probe:
    """That of the backend under test."""
    return Registry.load().find_backend(os.environ[VARIABLE]).spec.probe()


def make(options: Mapping[str, Any] | None = None) -> Backend:
    """The backend under test, which refuses no engine any more."""
    backend = Registry.load().create_backend(os.environ[VARIABLE], options)
    backend.name = NAME
    backend.unsupported_engines = {}
    return backend


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    """Announce it."""
    return [
        BackendSpec(
            name=NAME,
            factory=f"{__name__}:make",
            probe=probe,
            api_version=API_VERSION,
            priority=-1000,
        )
    ]
