"""Which plain words of YAML are numbers: as it is read, and as it is written.

PyYAML's own reading takes 12:30:00 for a count of seconds, 010 for 8, and 2e-4 for text.
"""

from __future__ import annotations

import re

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
