"""Backends and plans made from options as a run file has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from anygauge.interface import Job, LaunchProfile, Plan
from anygauge.registry import Registry
from anygauge.registry.specs import read_options


@cache
def registry() -> Registry:
    """The plugins of this process."""
    return Registry.load()


def backend_with(name: str, options: Mapping[str, Any]) -> Any:
    """A backend with ``backend_options``."""
    return registry().create_backend(name, options)


def render(
    launcher: str, job: Job, options: Mapping[str, Any], profile: LaunchProfile | None = None
) -> Plan:
    """What a launcher would do with ``launch.options``."""
    read = read_options(registry().find_launcher(launcher), options)
    return registry().launcher(launcher)().render(job, read, profile or LaunchProfile())
