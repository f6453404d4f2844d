"""Jobs for tests."""

from __future__ import annotations

from typing import Any

from anygauge.interface import Job, LaunchSettings

LAUNCH = set(LaunchSettings.model_fields)
USUAL = {"name": "t", "backend": "cpu", "strategy": "single", "rendezvous": "file:///nowhere"}


def make_job(**values: Any) -> Job:
    """A job; fields of its launch settings stand beside its own, what USUAL has may be left out."""
    launch = {name: values.pop(name) for name in LAUNCH & set(values)}
    home = str(values.pop("run_directory"))
    fields = {**USUAL, "run_file": f"{home}/run.yaml", **values}
    return Job(launch=LaunchSettings(**launch), run_directory=home, **fields)
