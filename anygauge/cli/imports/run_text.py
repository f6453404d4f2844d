"""A draft as the text of a run file: what changes a result first, each value with its origin."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anygauge.cli.imports.draft import BLANK, Draft, Leaf, given
from anygauge.config.describe import Kind
from anygauge.config.schema import RunFile
from anygauge.config.yaml_text import write_flow

_WIDTH = 100
REASONS = {
    "speed": "Speed and memory, which change no result",
    "logging": "Logging, and how often it evaluates and saves",
    "naming": "Names and folders",
    "upload": "Upload",
    "telemetry": "Telemetry",
}
ANYWAY = "Without effect there, or what anygauge does anyway"


def run_text(draft: Draft) -> str:
    """The run file as YAML with comments."""
    lines = [f"# From {draft.file.name} ({draft.tool}), by `anygauge import`."]
    if draft.blocked:
        lines += ["#", "# LEFT OUT, although they change the result (--allow-dropped):"]
        lines += _items(f"{key}: {nearest}" for key, nearest in draft.blocked.items())
    if draft.changes:
        lines += ["#", "# What may change a result:", *_items(draft.changes)]
    for why, keys in draft.meaningless.items():
        lines += ["#", *_wrapped(f"{REASONS[why]}: {'; '.join(keys)}", "# ", "#   ")]
    fields = [*_lines(draft.tree, Kind(RunFile), top=True)]
    named = {*re.findall(r"\w+", " ".join([*lines, *fields]))}
    rest = [
        given(key, value)
        for key, value in draft.given.items()
        if value not in BLANK and key not in named
    ]
    if rest:
        lines += ["#", *_wrapped(f"{ANYWAY}: {'; '.join(rest)}", "# ", "#   ")]
    return "\n".join([*lines, "", *fields, ""])


def _items(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from _wrapped(text, "# - ", "#   ")


def _wrapped(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=then,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _lines(tree: Mapping[str, Any], kind: Kind | None, *, top: bool = False) -> Iterator[str]:
    """Fields in the order of their section."""
    section = None if kind is None else kind.section
    order = list(section.model_fields) if section is not None else []
    names = sorted(tree, key=lambda name: order.index(name) if name in order else len(order))
    for at, name in enumerate(names):
        value = tree[name]
        if top and at and not (isinstance(value, Leaf) and isinstance(tree[names[at - 1]], Leaf)):
            yield ""
        below = None if kind is None else kind.child(name)
        if isinstance(value, Leaf):
            comment = f"  # {value.origin}" if value.origin else ""
            yield f"{name}: {write_flow(value.value)}{comment}"
        elif isinstance(value, list):
            yield f"{name}:"
            for item in value:
                first, *rest = _lines(item, below.item if below else None)
                yield from (f"  - {first}", *(f"    {line}" for line in rest))
        else:
            yield f"{name}:"
            yield from (f"  {line}" if line else "" for line in _lines(value, below))
