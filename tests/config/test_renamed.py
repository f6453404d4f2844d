"""Names of version 0.1: who writes one is told today's, and what that version wrote is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config.describe import kind_at
from anygauge.config.renamed import RECORD, RENAMED, translated_record
from anygauge.config.tree import Origin, YamlNode

PATHS = sorted(RENAMED.items())
EMPTY = YamlNode({}, Origin("run.yaml", None, Path()))


@pytest.mark.parametrize(("old", "new"), PATHS)
def test_an_old_name_is_no_field_and_the_new_one_is(old: tuple[str, ...], new: str) -> None:
    parent = (*old[:-1], 0) if kind_at((*old[:-1], 0), EMPTY) else old[:-1]
    assert kind_at((*parent, old[-1]), EMPTY) is None
    assert kind_at((*parent, new), EMPTY) is not None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("adapter:\n  rank: 4", "run.yaml:4: adapter.rank: is called adapter.r now; rename it"),
        (
            "adapter:\n  groups:\n  - targets: [a]\n    rank: 2",
            "run.yaml:6: adapter.groups[0].rank: is called adapter.groups[0].r now; rename it",
        ),
        (
            "precision: {reduce: compute}",
            "run.yaml:3: precision.reduce: is called precision.reduce_dtype now; rename it (and "
            "its value compute, which is now param_dtype)",
        ),
    ],
)
def test_an_old_name_is_answered_with_the_new(folder, minimal, text, complaint) -> None:
    assert folder.refuse(minimal + text) == [complaint]


def test_an_old_name_of_the_command_line_is_answered_with_the_new(folder, minimal) -> None:
    complaint = "--set adapter.rank=4: adapter.rank: is called adapter.r now; rename it"
    assert folder.refuse(minimal, "adapter.rank=4") == [complaint]


def test_a_resolved_run_file_of_0_1_is_read_with_todays_names(folder, minimal) -> None:
    text = RECORD + minimal + "adapter: {rank: 4, groups: [{targets: [a], rank: 2}]}"
    adapter = folder.load(text).run.adapter
    assert (adapter.r, adapter.groups[0].r) == (4, 2)
    assert folder.load(text, "adapter.r=8").run.adapter.r == 8
    folder.write("old.yaml", text)
    assert folder.load("extends: old.yaml\nadapter: {r: 3}").run.adapter.r == 3


def test_an_old_name_beside_the_new_one_is_refused_in_such_a_file_too(folder, minimal) -> None:
    text = RECORD + minimal + "adapter: {rank: 4, r: 2}"
    assert folder.refuse(text) == ["run.yaml:4: adapter.rank: is called adapter.r now; rename it"]


def test_values_of_checkpoints_have_todays_names() -> None:
    kept = {"adapter": {"rank": 4, "groups": [{"rank": 2}]}, "model.config.rank": 1}
    today = {"adapter": {"r": 4, "groups": [{"r": 2}]}, "model.config.rank": 1}
    assert translated_record(kept) == today
    assert translated_record(today) == today
    dotted = {"adapter.rank": 4, "adapter.groups": [{"rank": 2}], "precision.reduce": "compute"}
    assert translated_record(dotted) == {
        "adapter.r": 4,
        "adapter.groups": [{"r": 2}],
        "precision.reduce_dtype": "param_dtype",
    }


def test_values_that_are_nested_without_an_end_are_left_alone() -> None:
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"rank": deep}
    assert translated_record({"x": deep, "adapter": deep})["x"] is deep
