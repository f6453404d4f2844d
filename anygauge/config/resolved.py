"""A resolved run as text: JSON for agents and ranks, and a run file for people.

Which plain words of YAML are numbers is said here for its reader too: PyYAML's own reading takes
12:30:00 for a count of seconds, 010 for 8, and 2e-4 for text.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from anygauge.config.paths import Place, holds_template, locate, places_of_paths
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError
from anygauge.util.schema import first_complaint

TAG = "tag:yaml.org,2002:"

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"""[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.(?:inf|Inf|INF))$
    |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
RESOLVERS = (
    (f"{TAG}int", _INT, list("-+0123456789")),
    (f"{TAG}float", _FLOAT, list("-+.0123456789")),
)
"""Tag, pattern, characters that it may begin with."""

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


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; quotes all text that our reader or another's takes for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value again wherever it stands, and no alias for it."""
        return True


for _tag, _pattern, _first in RESOLVERS:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML writes a lone U+0085 in single quotes, and reads it back as a space.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def dump_run(run: RunFile) -> str:
    """YAML that `load_run_file` reads back to an equal run.

    Args:
        run: as loaded. A relative path in a run that was made by hand is taken as relative to the
            current directory.
    """
    values = values_of(run)
    for path in places_of_paths(partial(_at, values)):
        text = _at(values, path)
        if isinstance(text, str) and not holds_template(path, text):
            # The reader replaces variables; a dollar sign that is part of the path is doubled.
            absolute = locate(path, text, Path.cwd()).replace("$", "$$")
            _at(values, path[:-1])[path[-1]] = absolute
    return _HEADER + yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000
    )


def _at(values: Any, path: Place) -> Any:
    """What stands at a path; None where something on the way is null."""
    for part in path:
        if values is None:
            return None
        values = values[part]
    return values
