"""A picture of a run's losses over its steps (SVG), for the model card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

FILE = "loss.svg"
WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 32, 40
COLORS = ("#332288", "#cc6677", "#44aa99", "#999933")
"""Of Paul Tol's muted scheme, safe for people with color blindness."""
MAX_POINTS = 400
"""Points of a line; the losses of neighbouring steps are averaged."""
TICKS = 5

Points = Sequence[tuple[int, float]]


def loss_curve(lines: Mapping[str, Points]) -> str:
    """The text of an SVG file; "" where there is nothing to draw a line through.

    Args:
        lines: name -> (step, loss in nats per loss token, or pair), by step.
    """
    drawn = {name: _average(points) for name, points in lines.items()}
    losses = [loss for points in drawn.values() for _, loss in points]
    steps = [step for points in drawn.values() for step, _ in points]
    if not steps or min(steps) == max(steps):
        return ""
    low, high = min(losses), max(losses)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in range(TICKS):
        loss = low + (high - low) * tick / (TICKS - 1)
        step = first + (last - first) * tick / (TICKS - 1)
        end = f'x2="{WIDTH - RIGHT}" y2="{y(loss):.1f}" stroke="#dddddd"/>'
        parts.append(f'<line x1="{LEFT}" y1="{y(loss):.1f}" {end}')
        parts.append(_text(LEFT - 8, y(loss) + 4, f"{loss:.3g}", "end"))
        parts.append(_text(x(step), HEIGHT - BOTTOM + 18, f"{step:.0f}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle"))
    for place, (name, points) in enumerate(drawn.items()):
        color = COLORS[place % len(COLORS)]
        at = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        parts.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(_text(LEFT + 120 * place, 20, f"{name} loss", "start", color))
    return "\n".join([*parts, "</svg>\n"])


def _average(points: Points) -> Points:
    found = [(step, loss) for step, loss in points if math.isfinite(loss)]
    size = max(1, math.ceil(len(found) / MAX_POINTS))
    blocks = [found[at : at + size] for at in range(0, len(found), size)]
    return [(block[-1][0], sum(loss for _, loss in block) / len(block)) for block in blocks]


def _text(x: float, y: float, text: str, anchor: str, color: str = "#222222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{escape(text)}</text>'
