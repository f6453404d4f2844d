"""The charts of a report, drawn by matplotlib as SVG that a page takes in.

Why matplotlib: it is well kept, draws SVG without a browser, and what it draws has no script, so
that the page may forbid all scripts and fetch nothing. A chart is some 20 kB; the scripts of plotly
or Bokeh, which let a reader zoom, are 1 MB and more. The numbers are in a table below each chart.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anygauge.cli.report_runs import Points
from anygauge.interface import AnygaugeError

MOST_POINTS = 400
"""Points of a line: with more steps, a point is the mean of some, in a band from least to most."""
MOST_RUNS = 6
SIZE = (4.6, 2.7)
"""Inches. A phone shows a chart at about this size, so that its text can be read."""
LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
"""One a run, since not everybody tells all colors apart."""

PARTS = ((0.9, ""), (0.15, "////"), (0.45, ""), (0.15, "|||"))
"""Opacity and hatch of the parts of a bar."""

# Colors that no chart has otherwise; the page's style says what each is, in light and in dark.
_INK, _GRID = "#010203", "#010204"
_RUNS = tuple(f"#01030{at}" for at in range(MOST_RUNS))
_NAMES = {_INK: "ink", _GRID: "grid", **{color: f"run{at}" for at, color in enumerate(_RUNS)}}
_STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math"), False),
    **{"font.size": 8.5, "hatch.linewidth": 0.6, "axes.facecolor": "none"},
    **{"svg.fonttype": "none", "svg.hashsalt": "anygauge"},
}


def check_library() -> None:
    """Check that charts can be drawn.

    Raises:
        AnygaugeError: says what to install.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise AnygaugeError(
            f"the charts of a report need matplotlib, which cannot be imported ({error}): "
            "pip install 'anygauge[report]'"
        ) from None
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of its cache of fonts


@contextmanager
def _axes(name: str, drawn: list[str], height: float = SIZE[1]) -> Iterator[Any]:
    """Axes to draw on; the SVG is added to `drawn`."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        axes.tick_params(length=0)
        yield axes
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    drawn.append(_for_page(written.getvalue(), name))


def _for_page(svg: str, name: str) -> str:
    """The drawing alone, with the page's colors and width, and ids of its own."""
    svg = svg[svg.index("<svg") :]
    for useless in ("metadata", "style"):
        svg = re.sub(rf"<{useless}\b.*?</{useless}>", "", svg, flags=re.S)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg\b[^>]*?) {size}="[^"]*"', r"\1", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    for color, variable in _NAMES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def line_chart(
    name: str, lines: Sequence[tuple[int, str, Points]], *, unit: str, scale: float = 1.0
) -> str:
    """A chart of values over steps.

    Args:
        lines: number of the run, ``line`` or ``dots``, and the points.
        unit: of the values, below which it stands.
        scale: by which they are divided.
    """
    drawn: list[str] = []
    with _axes(name, drawn) as axes:
        for run, kind, points in lines:
            steps, means, least, most = _blocks(points, scale)
            color, dots = _RUNS[run], kind == "dots"
            look: dict[str, Any] = {"linestyle": "none" if dots else LINES[run], "linewidth": 1.4}
            if dots or len(steps) == 1:
                look |= {"marker": "o", "markersize": 4}
            axes.plot(steps, means, color=color, **look)
            if len(steps) < len(points):
                axes.fill_between(steps, least, most, color=color, alpha=0.2, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn[0]


def _blocks(points: Points, scale: float) -> tuple[list[float], ...]:
    """Step, mean, least and most of each block of neighbouring points."""
    size = -(-len(points) // MOST_POINTS)
    blocks = [points[at : at + size] for at in range(0, len(points), size)] if points else []
    values = [[value / scale for _, value in block] for block in blocks]
    means = [sum(each) / len(each) for each in values]
    return [b[-1][0] for b in blocks], means, [min(v) for v in values], [max(v) for v in values]


def bar_chart(
    name: str, rows: Sequence[tuple[str, int, Mapping[str, float]]], *, unit: str, stacked: bool
) -> str:
    """Horizontal bars, from the top.

    Args:
        rows: a title, the number of its run, and part -> value, of at most four parts.
        stacked: the parts follow each other; otherwise each has a bar.
    """
    from matplotlib.patches import Patch

    drawn: list[str] = []
    parts = list(dict.fromkeys(each for _, _, values in rows for each in values))
    looks = dict(zip(parts, PARTS, strict=False))
    thick = 0.7 if stacked else 0.8 / len(parts)
    with _axes(name, drawn, height=0.9 + 0.45 * len(rows)) as axes:
        for row, (_, run, values) in enumerate(rows):
            left = 0.0
            for at, each in enumerate(parts):
                alpha, hatch = looks[each]
                value = values.get(each, 0.0)
                shape = {"height": thick, "left": left, "hatch": hatch, "linewidth": 0}
                y = row if stacked else row + (at - (len(parts) - 1) / 2) * thick
                axes.barh(y, value, facecolor=(_RUNS[run], alpha), edgecolor=_INK, **shape)
                left += value if stacked else 0.0
        axes.set_yticks(range(len(rows)), [title for title, _, _ in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        keys = [
            Patch(facecolor=(_INK, alpha), hatch=hatch, edgecolor=_INK, linewidth=0.5, label=each)
            for each, (alpha, hatch) in looks.items()
        ]
        axes.figure.legend(handles=keys, loc="outside upper left", ncols=2, frameon=False)
    return drawn[0]
