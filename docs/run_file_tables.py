"""The documentation's tables of the run file's fields, made from the schema.

``python docs/run_file_tables.py docs/run-file.md`` writes them anew, between two marks of the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from anygauge.config.describe import field_kind, meaning, sections
from anygauge.config.strategies import StrategySection, named
from anygauge.interface.plugins import PROJECT
from anygauge.registry import installed_plugins
from anygauge.util.schema import Section

BEGIN = "<!-- fields: begin (written by python docs/run_file_tables.py) -->"
END = "<!-- fields: end -->"


def reference_markdown() -> str:
    """Markdown: a heading and a table (field, type, default, meaning) for each section."""
    others = {p.spec.name for p in installed_plugins().strategies if p.distribution != PROJECT}
    places: dict[type[Section], list[str]] = {}
    for path, section in sections():
        if not (issubclass(section, StrategySection) and named(section) in others):
            places.setdefault(section, []).append(".".join(path))
    return "\n".join(_section(section, paths) for section, paths in places.items())


def update(text: str) -> str:
    """`text` with everything between the two marks replaced by today's reference.

    Raises:
        ValueError: `text` lacks one of the marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference_markdown()}\n{END}{after}"


def _section(section: type[Section], paths: list[str]) -> str:
    title = " and ".join(f"`{path}`" for path in paths if path) or "Top level"
    if issubclass(section, StrategySection):
        title += f" with `name: {named(section)}`"
    head = ["| field | type | default | meaning |", "|---|---|---|---|"]
    says = " ".join((section.__doc__ or "").split())
    return "\n".join([f"### {title}", "", says, "", *head, *field_rows(section), ""])


def field_rows(model: type[BaseModel]) -> list[str]:
    """The rows of a table of fields: of a section, or of a plugin's options."""
    return [_row(name, field) for name, field in model.model_fields.items()]


def _row(name: str, field: FieldInfo) -> str:
    kind, says = _escaped(str(field_kind(field))), _escaped(meaning(field))
    return f"| `{name}` | {kind} | {_default(field).replace('|', '&#124;')} | {says} |"


def _escaped(text: str) -> str:
    """Text with the characters escaped that Markdown would take for markup or a cell's end."""
    return re.sub(r"([<|*\[\]])", r"\\\1", text)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "its defaults"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{}" if not value else "{...}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    if isinstance(value, str):
        # A line break would end the table's row.
        return value if value.isprintable() else json.dumps(value)
    return f"{value:g}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
