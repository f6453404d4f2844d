"""Bars of one figure as SVG, one picture for each part: no library draws them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.gpu.result import TableRow

WIDTH, LABEL, BAR, GAP, HEAD = 860, 330, 18, 6, 40
COLOURS = ("#1b7f79", "#8a8f98")
"""Of ours, and of all others."""
MARK = "#c2410c"
OURS = "anygauge"


def bars(title: str, heading: str, rows: Sequence[TableRow]) -> str:
    """A bar for each row that has the figure; a line across it is what was predicted.

    Returns:
        The SVG; empty where no row has a number under that heading.
    """
    known = [
        (row, _number(row.figures.get(heading)), _number(row.predicted.get(heading)))
        for row in rows
    ]
    known = [each for each in known if each[1] is not None or each[2] is not None]
    if not known:
        return ""
    most = max(value for _, *values in known for value in values if value is not None) or 1.0
    height = HEAD + len(known) * (BAR + GAP) + GAP
    scale = (WIDTH - LABEL - 110) / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{GAP}" y="22" font-size="14" font-weight="bold">{escape(title)}: '
        f"{escape(heading)}</text>",
    ]
    for place, (row, value, predicted) in enumerate(known):
        top = HEAD + place * (BAR + GAP)
        label = f"{row.case}: {row.name}" if row.case else row.name
        colour = COLOURS[0] if OURS in row.name or OURS in row.case else COLOURS[1]
        middle = top + BAR - 5
        parts.append(
            f'<text x="{LABEL - GAP}" y="{middle}" text-anchor="end">{escape(_short(label))}</text>'
        )
        length = 0.0 if value is None else value * scale
        parts.append(
            f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'
        )
        text = f"planned {predicted:,.4g}" if value is None else f"{value:,.4g}"
        end = max(length, 0.0 if predicted is None else predicted * scale)
        if predicted is not None:
            x = LABEL + predicted * scale
            parts.append(
                f'<path d="M{x:.1f} {top - 2}v{BAR + 4}" stroke="{MARK}" stroke-width="2"/>'
            )
        parts.append(f'<text x="{LABEL + end + GAP:.1f}" y="{middle}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _short(label: str, most: int = 52) -> str:
    return label if len(label) <= most else label[: most - 3] + "..."
