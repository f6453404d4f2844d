"""Writes a run as a run file that can be run again, from any directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from anygauge.config.paths import Place, holds_template, locate, places_of_paths
from anygauge.config.resolved import values_of
from anygauge.config.scalars import RESOLVERS
from anygauge.config.schema import RunFile

_HEADER = """\
# A resolved run file (format 2): every field with its value, all paths absolute.
# It can be run again as it stands, from any directory.
"""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; quotes all text that our reader or another's takes for a number."""


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

    def items(path: Place) -> int | None:
        found = _at(values, path)
        return len(found) if isinstance(found, list) else None

    for path in places_of_paths(items):
        _make_absolute(values, path)
    text = yaml.dump(
        _plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000
    )
    return _HEADER + text


def _at(values: Any, path: Place) -> Any:
    """What stands at a path; None where something on the way is null."""
    for part in path:
        if values is None:
            return None
        values = values[part]
    return values


def _make_absolute(values: dict[str, Any], path: Place) -> None:
    text = _at(values, path)
    if isinstance(text, str) and not holds_template(path, text):
        # The reader replaces variables; a dollar sign that is part of the path is doubled.
        absolute = locate(path, text, Path.cwd()).replace("$", "$$")
        _at(values, path[:-1])[path[-1]] = absolute


def _plain(value: Any) -> Any:
    """Lists for tuples, and no object twice: YAML would write an alias for the second."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
