"""The console that commands print through, by rich: it escapes control characters and wraps prose.

Names of files, hosts and models, and texts of rows, must not drive a terminal. What commands print
without rich passes through `anygauge.cli.EscapedStream`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import rich.console
from rich import box
from rich.segment import Segment
from rich.table import Table

from anygauge.util.text import escape, hang_indent


class Console(rich.console.Console):
    """rich's, with `escape` texts; its own styles and movements stay.

    A string is wrapped at words on a terminal, and whole in a file, unless COLUMNS is set.
    ``soft_wrap=True`` leaves it whole there too: a command, to be copied.
    """

    def __init__(self, **options: Any) -> None:
        """Args: options: those of rich's console."""
        # The stream itself: while a bar is drawn, rich puts one of its own before `EscapedStream`.
        stream = sys.stderr if options.get("stderr") else sys.stdout
        own = {"file": getattr(stream, "rich_proxied_file", None)}
        plain = {"markup": False, "emoji": False, "highlight": False}
        super().__init__(**{**plain, **own, **options})
        self.soft_wrap = not (self.is_terminal or "COLUMNS" in os.environ)

    @property
    def can_redraw(self) -> bool:
        """Whether what is shown can be redrawn in its place; a notebook does that by a library."""
        if self.is_jupyter:
            return find_spec("ipywidgets") is not None
        return self.is_terminal and not self.is_dumb_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich, which drops some control characters of a text before it renders it."""
        objects = tuple(escape(o) if isinstance(o, str) else o for o in objects)
        options["soft_wrap"] = options.get("soft_wrap") or self.soft_wrap
        if len(objects) == 1 and isinstance(objects[0], str) and not options["soft_wrap"]:
            objects = (hang_indent(objects[0], self.width),)
            options["soft_wrap"] = True  # rich would break a long path, to be copied
        super().print(*objects, **options)

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """See rich."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escape(text), style, control)


def make_table(rows: Sequence[Sequence[str]]) -> Table:
    """Headings first, and numbers behind the first column; no word is cut."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for cells in zip(*rows, strict=True):
        width = max(len(word) for cell in cells for word in cell.split())
        shown.add_column(cells[0], justify="right" if shown.columns else "left", min_width=width)
    for row in rows[1:]:
        shown.add_row(*row)
    return shown
