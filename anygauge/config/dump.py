"""Writes a run as a run file that can be run again, from any directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from anygauge.config.document import RESOLVERS
from anygauge.config.paths import ALL, locate
from anygauge.config.schema import RunFile

_HEADER = """\
# A resolved run file: every field with its value, all paths absolute.
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
    values = run.model_dump(mode="python")
    for path in ALL:
        _make_absolute(values, path)
    text = yaml.dump(
        _plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000
    )
    return _HEADER + text


def _make_absolute(values: dict[str, Any], path: tuple[str, ...]) -> None:
    section: Any = values
    for part in path[:-1]:
        section = section.get(part)
        if section is None:
            return
    text = section[path[-1]]
    if text is not None:
        # The reader replaces variables; a dollar sign that is part of the path is doubled.
        section[path[-1]] = locate(path, text, Path.cwd()).replace("$", "$$")


def _plain(value: Any) -> Any:
    """Lists for tuples, and no object twice: YAML would write an alias for the second."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
