"""The report: its verdict, against the whole contract, and its two forms."""

from __future__ import annotations

import json

import pytest

from anygauge.testing.plugin import ConformanceReport, Line, render

CONTENTS = {
    "test_on_paper[a]": ("on paper", "it is told"),
    "test_on_ranks[b]": ("on several ranks", "they meet"),
    "test_on_ranks[c]": ("on several ranks", "they part"),
}


def report(**results: str) -> ConformanceReport:
    """Of the contents above, by letter; those left out were not run."""
    found = ConformanceReport(backend="mine", distribution="mine 1.0", contents=CONTENTS)
    for name, (part, title) in CONTENTS.items():
        letter = name[-2]
        if letter in results:
            found.lines.append(
                Line(part=part, name=name, title=title, result=results[letter], why="so | so")
            )
    return found


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ({"a": "passed", "b": "passed", "c": "passed"}, "conforms"),
        ({"a": "passed", "b": "declared", "c": "skipped"}, "conforms"),
        ({}, "is not fully tried"),
        ({"a": "passed"}, "is not fully tried"),
        ({"a": "passed", "b": "passed", "c": "untried"}, "is not fully tried"),
        ({"a": "failed"}, "does NOT conform"),
        ({"a": "failed", "b": "passed", "c": "untried"}, "does NOT conform"),
    ],
)
def test_the_verdict_is_on_the_whole_contract(results: dict[str, str], verdict: str) -> None:
    found = report(**results)
    assert found.verdict == verdict
    assert found.markdown().startswith(f"# `mine` {verdict} ")
    assert verdict in found.terminal()[0]
    assert found.record()["conforms"] is (verdict == "conforms")


def test_what_was_not_tried_is_named() -> None:
    found = report(a="passed", b="untried")
    gaps = "2 of 3 checks were not tried: on several ranks (all 2)"
    assert found.gaps() == gaps
    assert f"\n{gaps}.\n" in found.markdown()
    assert gaps in found.terminal()
    assert found.record()["not_tried"] == ["test_on_ranks[b]", "test_on_ranks[c]"]
    assert report(b="passed").gaps().endswith("on paper (all 1), on several ranks (1 of 2)")
    assert report(a="passed", b="skipped", c="passed").gaps() == ""


def test_a_page_counts_and_shows_every_line() -> None:
    found = report(a="passed", b="failed", c="untried")
    assert found.counts() == "1 passed, 1 not tried, 1 FAILED"
    page = found.markdown()
    assert "| they meet | FAIL: so \\| so |" in page, "a bar in a table's cell"
    assert "| they part | not tried: so \\| so |" in page


def test_several_reports_are_one_json_document() -> None:
    assert json.loads(render([report()], ".json"))["backend"] == "mine"
    assert [each["backend"] for each in json.loads(render([report(), report()], ".json"))] == [
        "mine",
        "mine",
    ]
    assert render([report(), report()], ".md").count("# `mine` is not fully tried") == 2
