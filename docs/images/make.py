"""Turns what a command prints into a picture: ``COMMAND | python docs/images/make.py ...``.

From the root of the repository, once ``make demo`` has run::

    anygauge train examples/demo/finetune.yaml | \\
        python docs/images/make.py "anygauge train examples/demo/finetune.yaml" \\
        docs/images/train.svg

Lines are drawn as they come; of a long output the middle is left out, with the number of lines.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text


def picture(command: str, lines: Sequence[str], most: int) -> str:
    """An SVG of a terminal that shows a command and its output.

    Args:
        most: lines of output to show; the middle of a longer one is left out.
    """
    shown = list(lines)
    if len(shown) > most:
        head, tail = most // 2, most - most // 2 - 1
        left_out = f"... {len(shown) - head - tail} more lines ..."
        shown = [*shown[:head], left_out, *shown[-tail:]]
    width = max(len(line) for line in (f"$ {command}", *shown))
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    for line in shown:
        console.print(Text(line))
    return console.export_svg(title=command)


def main() -> None:
    """Read standard input, write the picture, and pass the input on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", help="what was run, as it is to be shown")
    parser.add_argument("output", type=Path, help="the SVG file to write")
    parser.add_argument("--most", type=int, default=24, help="lines of output to show")
    arguments = parser.parse_args()
    text = sys.stdin.read()
    sys.stdout.write(text)
    svg = picture(arguments.command, text.splitlines(), arguments.most)
    arguments.output.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
