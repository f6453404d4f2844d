"""A resolved run as the command hands it to agents and ranks: JSON, which the schema reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError


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
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise AnygaugeError(
            f"this is not a resolved run of the installed version of anygauge ({where}: "
            f"{first['msg']}). Do the machine that starts the run and those of its ranks have the "
            "same version?"
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
