"""Values as YAML text, for ranks too, which read none; and which plain words of YAML are numbers.

PyYAML's own reading takes 12:30:00 for a count of seconds, 010 for 8, and 2e-4 for text.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from anygauge.util.text import shorten

TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"""[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.(?:inf|Inf|INF))$
    |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


def add_numbers(class_: type[yaml.resolver.BaseResolver]) -> None:
    """Make a loader or dumper take our words for numbers."""
    class_.add_implicit_resolver(f"{TAG}int", _INT, list("-+0123456789"))
    class_.add_implicit_resolver(f"{TAG}float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; quotes all text that our reader or another's takes for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value again wherever it stands, and no alias for it."""
        return True


add_numbers(_Dumper)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML writes a lone U+0085 in single quotes, and reads it back as a space.
    return dumper.represent_scalar(f"{TAG}str", text, None if text.isprintable() else '"')


def _represent_other(dumper: yaml.SafeDumper, value: Any) -> yaml.Node:
    """What programs have in the place of plain values: paths, and NumPy's texts and numbers.

    Raises:
        ValueError: YAML has no such value.
    """
    if isinstance(value, os.PathLike | str):
        return dumper.represent_data(str(os.fspath(value)))
    if isinstance(value, numbers.Integral):
        return dumper.represent_data(int(value))
    if isinstance(value, numbers.Real):
        return dumper.represent_data(float(value))
    got = f"got {shorten(repr(value))} ({type(value).__name__}), expected what YAML has: "
    raise ValueError(got + "texts, numbers, true, false, null, lists and mappings")


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(object, _represent_other)


def write_yaml(values: Mapping[str, Any]) -> str:
    """YAML that `document.read_yaml` reads as equal values; in their order, and without aliases."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)


def write_flow(value: Any) -> str:
    """One value as YAML on one line."""
    text = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=math.inf
    )
    return text.strip()[1:-1]
