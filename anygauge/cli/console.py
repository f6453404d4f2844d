"""The console that commands print through, by rich: it escapes control characters.

Names of files, hosts and models, and texts of rows, must not drive a terminal. What commands print
without rich passes through `anygauge.cli.EscapedStream`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from anygauge.util.text import escaped


class Console(rich.console.Console):
    """rich's, with `escaped` texts; its own styles and movements stay."""

    def __init__(self, **options: Any) -> None:
        # The stream itself: while a bar is drawn, rich puts one of its own before `EscapedStream`.
        stream = sys.stderr if options.get("stderr") else sys.stdout
        own = {"file": getattr(stream, "rich_proxied_file", None)}
        super().__init__(**{**own, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich, which drops some control characters of a text before it renders it."""
        super().print(*(escaped(o) if isinstance(o, str) else o for o in objects), **options)

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """See rich."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escaped(text), style, control)
