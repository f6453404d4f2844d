"""Runs on one data set in several ways: what they read decides their losses, not how it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import Run, run_file, trained, trained_here
from tests.helpers.tokenizer import FIXTURES

ROWS = str(FIXTURES / "rows.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modes")


def run(folder: Path, name: str, **data: Any) -> Run:
    train = {"epochs": 1, "steps": None}
    return trained_here(
        run_file(folder, name=name, strategy={"name": "single"}, data=data, train=train)
    )


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Run:
    return run(folder, "prepared", eval_fraction=0.2)


def report(run: Run) -> str:
    return json.loads((run.folder / "report.json").read_text())["data"]


def test_a_second_run_takes_its_rows_from_the_cache(folder: Path, prepared: Run) -> None:
    cache = folder / "cache"
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix != ".lock"}
    again = run(folder, "again", eval_fraction=0.2)
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix != ".lock"}
    assert before and after == before
    assert report(again) == report(prepared)
    assert again.steps("loss") == prepared.steps("loss")
    assert again.evaluations() == prepared.evaluations()


def test_a_streamed_run_is_the_prepared_one(folder: Path, prepared: Run) -> None:
    streamed = run(folder, "streamed", eval_fraction=0.2, streaming=True)
    assert report(streamed) == f"streamed {report(prepared)}"
    assert streamed.steps("loss") == prepared.steps("loss")
    assert streamed.steps("tokens") == prepared.steps("tokens")
    assert streamed.evaluations() == prepared.evaluations()


def test_grouped_rows_are_all_read(folder: Path, prepared: Run) -> None:
    grouped = run(folder, "grouped", eval_fraction=0.2, group_by_length=True)
    assert sum(grouped.steps("tokens")) == sum(prepared.steps("tokens"))
    assert grouped.steps("tokens")[0] == max(grouped.steps("tokens"))


def test_two_sources_are_read_by_their_weights(folder: Path) -> None:
    sources = [{"path": ROWS, "limit": 8}, {"path": ROWS, "limit": 4, "weight": 2.0}]
    weighted = run(folder, "weighted", train=sources)
    assert len(weighted.steps("loss")) == 4, "8 rows and twice 4, in steps of 4"
    assert weighted.steps("epoch")[-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_two_ranks_share_what_one_read(folder: Path, prepared: Run, streaming: bool) -> None:
    path = run_file(
        folder,
        name=f"two-{streaming}",
        data={"eval_fraction": 0.2, "streaming": streaming, "cache": str(folder / "another")},
        train={"epochs": 1, "steps": None, "global_batch_size": 4, "micro_batch_size": 2},
    )
    both = trained(path, "--devices", "2")
    assert both.steps("tokens") == prepared.steps("tokens")
    assert both.steps("num_loss_tokens") == prepared.steps("num_loss_tokens")
    assert both.steps("loss") == pytest.approx(prepared.steps("loss"), rel=1e-4)
    assert both.evaluations() == pytest.approx(prepared.evaluations(), rel=1e-4)
