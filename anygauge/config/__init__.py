"""What a run is: a YAML file and overrides, checked, as one frozen object.

Names are imported when they are used, so that a command which reads no run file does not wait for
pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge.config.dump import dump_run
    from anygauge.config.load import LoadedRun, check_folders, check_paths, load_run_file
    from anygauge.config.origin import Origin
    from anygauge.config.reference import reference_markdown
    from anygauge.config.resolved import parse_run, read_run, run_json
    from anygauge.config.schema import RunFile, StrategySection

__all__ = [
    "LoadedRun",
    "Origin",
    "RunFile",
    "StrategySection",
    "check_folders",
    "check_paths",
    "dump_run",
    "load_run_file",
    "parse_run",
    "read_run",
    "reference_markdown",
    "run_json",
]

_HOMES = {
    "LoadedRun": "load",
    "Origin": "origin",
    "RunFile": "schema",
    "StrategySection": "schema",
    "check_folders": "load",
    "check_paths": "load",
    "dump_run": "dump",
    "load_run_file": "load",
    "parse_run": "resolved",
    "read_run": "resolved",
    "reference_markdown": "reference",
    "run_json": "resolved",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
