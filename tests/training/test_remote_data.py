"""Runs on a data set that is streamed from a stand-in of the hub: nothing stays on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import Run, run_file, trained_here
from tests.standins.hub import Hub, Repository, use_hub

NAME = "owner/name"
ROWS = [
    {"prompt": f"Count to {n}:", "completion": f"{n} " * (n % 9 + 1), "note": "x" * 3000}
    for n in range(600)
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With a data set of 600 rows in two files."""
    files = {
        f"train-{number}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
        for number, rows in enumerate((ROWS[:400], ROWS[400:]))
    }
    with Hub({f"datasets/{NAME}": Repository(files=files)}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        yield hub
    assert hub.strangers == []


def run(folder: Path, name: str, **sections: Any) -> Run:
    return trained_here(
        run_file(
            folder,
            name=name,
            data={"train": {"path": NAME}, "streaming": True, "shuffle_buffer": 50},
            train={"steps": 40, "global_batch_size": 8, "micro_batch_size": 4},
            strategy={"name": "single"},
            **sections,
        )
    )


def test_a_run_streams_from_the_hub_resumes_and_keeps_nothing(hub: Hub, tmp_path: Path) -> None:
    straight = run(tmp_path, "straight", checkpoint={"every": 20})
    assert len(straight.steps("loss")) == 40
    report = json.loads((straight.folder / "report.json").read_text())["data"]
    # The thread that works ahead may have counted a step more.
    assert report.startswith("streamed 3"), report
    (half,) = straight.folder.glob("checkpoints/*20*")
    resumed = run(tmp_path, "resumed", checkpoint={"resume": str(half)})
    assert resumed.steps("loss") == straight.steps("loss")[20:]
    assert resumed.steps("tokens") == straight.steps("tokens")[20:]
    caches = (tmp_path / "hf", tmp_path / "cache")
    kept = [p for at in caches for p in at.rglob("*") if p.is_file() and p.stat().st_size]
    assert sum(p.stat().st_size for p in kept) < 1000, kept
    assert not list(tmp_path.glob("cache/rows")), "no row is tokenised before the run"
