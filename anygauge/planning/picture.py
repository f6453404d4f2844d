"""A picture of a plan: what each phase takes of a card, as bars against its memory (SVG)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from anygauge.planning.fit import GIB, Fit
from anygauge.planning.memory import KINDS, RunMemory

COLOURS = (
    "#332288",
    "#88ccee",
    "#44aa99",
    "#117733",
    "#999933",
    "#ddcc77",
    "#cc6677",
    "#882255",
    "#aa4499",
)
"""Paul Tol's muted scheme, safe for people with colour blindness; in the order of kinds."""
ON_TOP = "slack, context, collectives"
ON_TOP_COLOUR = "#bbbbbb"
LIMIT_COLOUR = "#cc3311"

WIDTH = 860
LEFT, RIGHT = 104, 92
BAR, GAP = 30, 16
TOP = 106


def picture(found: RunMemory, fit: Fit | None, title: str, card: str) -> str:
    """The text of an SVG file.

    Args:
        fit: None where no card's memory is known: then there is no line.
        title: what was planned, in a line.
        card: its name.
    """
    bars = {phase: dict(peak.kinds) for phase, peak in found.device.items()}
    for phase, kinds in bars.items():
        # The kinds of an extrapolated peak may miss its total by a little.
        rest = found.device[phase].total - sum(kinds.values())
        largest = max(kinds, key=lambda kind: kinds[kind], default="tensors")
        kinds[largest] = kinds.get(largest, 0) + rest
        if fit is not None:
            kinds[ON_TOP] = fit.phases[phase] - found.device[phase].total
    names = [kind for kind in _ordered(bars) if any(kinds.get(kind) for kinds in bars.values())]
    colours = dict(zip(names, COLOURS * len(names), strict=False)) | {ON_TOP: ON_TOP_COLOUR}
    most = max(sum(kinds.values()) for kinds in bars.values())
    most = max(most, 0 if fit is None else fit.memory)
    tick = _tick(most)
    marks = math.ceil(most / GIB / tick)
    scale = (WIDTH - LEFT - RIGHT) / (marks * tick * GIB)
    bottom = TOP + len(bars) * (BAR + GAP)
    lines = [*_legend(names, colours), *_axis(tick, marks, scale, bottom)]
    values: list[str] = []
    for number, (phase, kinds) in enumerate(bars.items()):
        y = TOP + number * (BAR + GAP) + GAP // 2
        lines.append(_text(LEFT - 10, y + BAR / 2 + 4, phase, anchor="end"))
        lines += _bar(y, [(kind, kinds.get(kind, 0), colours[kind]) for kind in names], scale)
        total = sum(kinds.values())
        over = fit is not None and total > fit.memory
        values += _value(LEFT + total * scale, y, total, LIMIT_COLOUR if over else "#222222")
    if fit is not None:
        x = LEFT + fit.memory * scale
        said = f"{card}: {fit.memory / GIB:.1f} GiB"
        lines.append(
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" '
            f'stroke="{LIMIT_COLOUR}" stroke-width="2" stroke-dasharray="6 4"/>'
        )
        end = x > WIDTH / 2
        lines.append(_text(x, TOP - 12, said, "end" if end else "start", LIMIT_COLOUR, bold=True))
    lines += values  # over the line
    height = bottom + 52
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
            'font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            _text(16, 26, title, size=16, bold=True),
            *lines,
            _text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, "GiB on each device", "middle"),
            "</svg>\n",
        ]
    )


def _ordered(bars: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Kinds in the order of `KINDS`; what comes on top of all is last."""
    names = dict.fromkeys(kind for kinds in bars.values() for kind in kinds if kind != ON_TOP)
    known = [kind for kind in KINDS if kind in names]
    return [*dict.fromkeys([*known, *names]), ON_TOP]


def _tick(most: int) -> float:
    """GiB between two marks of the axis, of which there are 4 to 10."""
    steps = (one * 10.0**power for power in range(-3, 5) for one in (1, 2, 5))
    return next(step for step in steps if most / GIB / step <= 9)


def _legend(names: Sequence[str], colours: Mapping[str, str]) -> list[str]:
    lines, x, y = [], 16.0, 42
    for name in names:
        width = 19 + 7.0 * len(name) + 20
        if x + width > WIDTH:
            x, y = 16.0, y + 20
        lines.append(f'<rect x="{x:.0f}" y="{y}" width="13" height="13" fill="{colours[name]}"/>')
        lines.append(_text(x + 19, y + 11, name))
        x += width
    return lines


def _axis(tick: float, marks: int, scale: float, bottom: float) -> list[str]:
    lines = []
    for mark in (number * tick for number in range(marks + 1)):
        x = LEFT + mark * GIB * scale
        lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        lines.append(_text(x, bottom + 18, f"{mark:g}", "middle", "#555555"))
    return lines


def _bar(y: float, parts: Sequence[tuple[str, int, str]], scale: float) -> list[str]:
    lines, x = [], float(LEFT)
    for name, size, colour in parts:
        width = size * scale
        if width <= 0:
            continue
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" fill="{colour}">'
            f"<title>{escape(name)}: {size / GIB:.2f} GiB</title></rect>"
        )
        x += width
    return lines


def _value(x: float, y: float, size: int, colour: str) -> list[str]:
    """What a bar sums up to, behind its end, on a ground of its own."""
    said = f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2f}"
    ground = f'<rect x="{x + 4:.1f}" y="{y + 6:.1f}" width="{8 * len(said) + 3}" height="18" '
    return [
        f'{ground}fill="#ffffff"/>',
        _text(x + 6, y + BAR / 2 + 4, said, "start", colour, bold=True),
    ]


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    colour: str = "#222222",
    *,
    size: int = 13,
    bold: bool = False,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}"{weight}>{escape(text)}</text>'
    )
