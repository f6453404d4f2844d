"""A resolved run as text: JSON for agents and ranks, and a run file for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anygauge.config.paths import locate, paths_in, value_at
from anygauge.config.schema import RunFile
from anygauge.config.yaml_text import write_yaml
from anygauge.interface import AnygaugeError
from anygauge.util.section import first_complaint

_HEADER = """\
# A resolved run file (format 2): every field with its value, all paths absolute.
# It can be run again as it stands, from any directory.
"""


def values_of(run: RunFile) -> dict[str, Any]:
    """Every field with its value; but none that an adapter to start from decides instead."""
    values = run.model_dump(mode="python")
    if run.adapter is not None and run.adapter.start_from is not None:
        # Written out, a default would contradict the adapter.
        for name in run.adapter.left_out:
            del values["adapter"][name]
    return values


def run_json(run: RunFile) -> str:
    """The text that `parse_run` reads back to an equal run.

    Args:
        run: as loaded: its paths are absolute.
    """
    return json.dumps(values_of(run)) + "\n"


def parse_run(text: str | bytes) -> RunFile:
    """The run of `run_json`.

    Raises:
        AnygaugeError: another version has written it, or something else.
    """
    try:
        return RunFile.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise AnygaugeError(
            "this is not a resolved run of the installed version of anygauge "
            f"({first_complaint(error)}). Do the machine that starts the run and those of its "
            "ranks have the same version?"
        ) from error


def read_run(path: Path) -> RunFile:
    """The run of a file that `run_json` was written to.

    Raises:
        AnygaugeError: it cannot be read.
    """
    try:
        return parse_run(path.read_bytes())
    except (OSError, AnygaugeError) as error:
        raise AnygaugeError(f"{path}: {error}") from error


def dump_run(run: RunFile) -> str:
    """YAML that `load_run_file` reads back to an equal run.

    Args:
        run: as loaded. A relative path in a run that was made by hand is taken as relative to the
            current directory.
    """
    return _HEADER + write_yaml(absolute_paths(values_of(run)))


def absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, changed: with paths as the reader of run files takes them for these."""
    for place, path in paths_in(values):
        # The reader replaces variables; a dollar sign that is part of the path is doubled.
        absolute = locate(place, path, Path.cwd()).replace("$", "$$")
        value_at(values, place[:-1])[place[-1]] = absolute
    return values
