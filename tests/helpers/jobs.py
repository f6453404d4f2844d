"""Jobs for tests."""

from __future__ import annotations

from typing import Any

from anygauge.interface import Job, LaunchSettings

LAUNCH = set(LaunchSettings.model_fields)


def make_job(**values: Any) -> Job:
    """A job; fields of its launch settings stand beside its own."""
    launch = {name: values.pop(name) for name in LAUNCH & set(values)}
    return Job(launch=LaunchSettings(**launch), **values)
