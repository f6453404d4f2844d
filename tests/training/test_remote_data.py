"""Runs on a data set that is streamed from a stand-in of the hub: nothing stays on the disk."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from anygauge.data import remote, streams
from anygauge.interface import RunFileError
from tests.helpers.runs import Run, run_file, trained_here
from tests.standins.hub import Hub, Repository, use_hub

NAME = "owner/name"
BLOCK = 50
ROWS = [
    {
        "prompt": f"Count to {n}:",
        "completion": f"{n} " * (n % 9 + 1),
        "note": np.random.default_rng(n).bytes(1500).hex(),
    }
    for n in range(600)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub({}) as hub:
        use_hub(monkeypatch, hub, folder)
        yield hub
    assert hub.strangers == []


def put(hub: Hub, folder: Path, kind: str) -> int:
    """A data set of 600 rows in two files; returns their bytes."""
    files = {}
    for number, rows in enumerate((ROWS[:400], ROWS[400:])):
        path = folder / f"train-{number}.{kind}"
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=BLOCK)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[path.name] = path.read_bytes()
    commit = hashlib.sha1(kind.encode()).hexdigest()
    hub.repositories[f"datasets/{NAME}"] = Repository(files=files, commit=commit)
    return sum(map(len, files.values()))


def run(folder: Path, name: str, *, train: dict[str, Any] | None = None, **sections: Any) -> Run:
    return trained_here(
        run_file(
            folder,
            name=name,
            data={"train": {"path": NAME}, "streaming": True, "shuffle_buffer": BLOCK},
            train={"steps": 40, "global_batch_size": 8, "micro_batch_size": 4, **(train or {})},
            strategy={"name": "single"},
            **sections,
        )
    )


def kept(folder: Path) -> list[Path]:
    """Files of the caches that hold anything."""
    places = (folder / "hf", folder / "cache")
    return [p for at in places for p in at.rglob("*") if p.is_file() and p.stat().st_size]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_run_streams_from_the_hub_and_keeps_nothing(
    kind: str, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = put(hub, folder, kind)
    held, most, lock = set(), [0], threading.Lock()

    class Counted(streams.StreamedRow):
        __slots__ = ()

        def __new__(cls, *args: Any) -> Any:
            made = super().__new__(cls, *args)
            with lock:
                held.add(id(made))
                most[0] = max(most[0], len(held))
            return made

        def __del__(self) -> None:
            with lock:
                held.discard(id(self))

    monkeypatch.setattr(streams, "StreamedRow", Counted)
    monkeypatch.setattr(remote, "BLOCK", 2**16)
    straight = run(folder, f"straight-{kind}", checkpoint={"every": 20})
    assert len(straight.steps("loss")) == 40
    report = json.loads((straight.folder / "report.json").read_text())["data"]
    # The thread that works ahead may have counted a step more.
    assert report.startswith("streamed 3"), report
    assert most[0] <= 3 * BLOCK + 20, "two blocks, one in the making, the rows of the first look"
    looks = 20 * 2**16  # the first rows, twice, and what stands at the end of Parquet files
    assert 320 / 600 < hub.sent / size < 0.85 + looks / size, "320 rows of 600, two blocks ahead"
    assert sum(p.stat().st_size for p in kept(folder)) < 1000, kept(folder)
    monkeypatch.setattr(streams, "StreamedRow", streams.StreamedRow.__mro__[1])
    (half,) = straight.folder.glob("checkpoints/*20*")
    hub.sent = 0
    resumed = run(folder, f"resumed-{kind}", checkpoint={"resume": str(half)})
    assert resumed.steps("loss") == straight.steps("loss")[20:]
    assert resumed.steps("tokens") == straight.steps("tokens")[20:]
    if kind == "parquet":
        assert hub.sent / size < 0.4 + looks / size, "the rows before are not read again"
    assert not list(folder.glob("cache/rows")), "no row is tokenised before the run"


def test_epochs_of_a_stream_whose_length_is_not_known(hub: Hub, folder: Path) -> None:
    put(hub, folder, "jsonl")
    said = r"how many rows owner/name\[train\] has before it reaches the end"
    with pytest.raises(RunFileError, match=said):
        run(folder, "endless", train={"steps": None, "epochs": 1})
    put(hub, folder, "parquet")
    counted = run(folder, "counted", train={"steps": None, "epochs": 0.1})
    assert len(counted.steps("loss")) == 8
    assert counted.steps("epoch")[-1] == pytest.approx(0.1)
