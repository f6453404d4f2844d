"""The picture of a run's losses."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from anygauge.models.curve import LEFT, MAX_POINTS, RIGHT, WIDTH, loss_curve

SVG = "{http://www.w3.org/2000/svg}"


def test_lines_go_from_the_first_step_to_the_last_and_down_with_the_loss() -> None:
    train = [(step, 4 - step / 1000) for step in range(1, 2001)]
    train[3] = (4, math.nan)
    picture = ElementTree.fromstring(
        loss_curve({"train": train, "<eval>": [(0, 4.0), (2000, 3.0)]})
    )
    lines = picture.findall(f"{SVG}polyline")
    points = [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in lines
    ]
    assert [len(line) for line in points] == [MAX_POINTS, 2]
    assert points[1][0][0] == LEFT and points[1][1][0] == points[0][-1][0] == WIDTH - RIGHT
    assert points[0][0][1] < points[0][-1][1]  # y goes down
    texts = [text.text for text in picture.findall(f"{SVG}text")]
    assert {"train loss", "<eval> loss", "step", "0", "2000"} <= set(texts)


def test_one_step_is_no_line() -> None:
    assert loss_curve({"train": [(1, 2.0)], "eval": []}) == loss_curve({"train": []}) == ""
