"""The table of starts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from benchmarks.start_up import StartUp, contenders, table


def test_ratios_are_taken_within_a_round() -> None:
    starts = [
        StartUp("ours", 2.0, 1.0, 1000),
        StartUp("ours", 4.0, 3.0, 1000),
        StartUp("theirs", 6.0, 5.0, 2000),
        StartUp("theirs", 4.0, 5.0, 2000),
    ]
    assert table(starts).splitlines()[2:] == [
        "| ours | 3.0 | 1.00 | 2.0 | 1,000 |",
        "| theirs | 5.0 | 2.00 | 5.0 | 2,000 |",
    ]


def test_our_own_contenders_run_an_older_checkout_too(tmp_path: Path) -> None:
    found = contenders("anygauge-fsdp,trainer", tmp_path)
    assert [checkout for _, checkout in found.values()] == [None, tmp_path, None]
    assert list(found)[1] == "before: anygauge, fsdp"


def test_an_unknown_contender_is_named() -> None:
    with pytest.raises(typer.BadParameter, match="'nobody': choose from anygauge, "):
        contenders("nobody", None)
