"""Ranks that others started, while the run is prepared: what one machine learns of another."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from anygauge.interface import AnygaugeError, Job, LaunchSettings
from anygauge.launch.decision import Decision
from anygauge.launch.foreign import ForeignLaunch
from anygauge.launch.foreign_prepare import RefusedError, prepare_with_others

SILENCE_S = 2.0
OTHER = "anygauge/prepared/1/1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """In which this machine, the first of two, has prepared its part at once."""
    decided = Decision(why="so it is")
    monkeypatch.setattr("anygauge.launch.prepare_here.prepare_here", lambda *args, **more: decided)
    return dist.HashStore()


def prepared(store: dist.Store, folder: Path) -> Decision:
    launch = ForeignLaunch(
        launcher="srun", rank=0, world_size=2, local_rank=0, devices=1, host="h", port=1
    )
    job = Job(
        name="n",
        run_directory=str(folder),
        run_file=str(folder / "run.json"),
        backend="cpu",
        launch=LaunchSettings(nodes=2, lost_after_s=SILENCE_S),
        rendezvous="served://h:1",
        id="1",
    )
    return prepare_with_others(store, launch, job, quiet=True)


def test_a_machine_that_falls_silent_is_lost(store: dist.Store, tmp_path: Path) -> None:
    with pytest.raises(AnygaugeError, match=r"node 1 is preparing .* for 2 s .*lost_after_s"):
        prepared(store, tmp_path)


def test_one_that_takes_long_is_waited_for(store: dist.Store, tmp_path: Path) -> None:
    def other() -> None:
        for _ in range(10):  # longer than any silence may be
            time.sleep(SILENCE_S / 8)
            store.add("anygauge/prepared/1/beats/1", 1)
        store.set(OTHER, Decision().dump())

    thread = threading.Thread(target=other)
    thread.start()
    assert prepared(store, tmp_path).why == "so it is"
    thread.join()


def test_why_another_machine_refuses_is_said(
    store: dist.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set(OTHER, "2 no such model")
    store.set("anygauge/prepared/1/heard/1", "")
    with pytest.raises(RefusedError, match="no such model") as caught:
        prepared(store, tmp_path)
    assert caught.value.exit_status == 2
    assert "error: no such model" in capsys.readouterr().err
