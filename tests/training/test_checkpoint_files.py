"""A checkpoint on disk is whole, or is found not to be; and only those wanted are kept."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.interface import AnygaugeError, Counters
from anygauge.training.checkpoints import manager as module
from anygauge.training.checkpoints.checkpoint_files import Checkpoint, write_checkpoint
from anygauge.training.checkpoints.manager import find_checkpoint
from anygauge.training.checkpoints.sound import find_defect
from tests.helpers.checkpoints import ALONE, RECORD, a_manager, exported, write
from tests.helpers.runs import run_file, trained_here


@pytest.mark.parametrize("shard_bytes", [1, 2**30])
def test_what_is_written_is_read_back(shard_bytes: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "step-00000003", shard_bytes=shard_bytes)
    assert find_defect(folder) is None
    opened = Checkpoint(folder)
    assert (opened.step, opened.counters) == (3, Counters(updates=3))
    assert opened.names() == ["layer.0.weight", "layer.1.weight"]
    for name, kind, tensor in exported():
        assert tensor is not None
        assert torch.equal(opened.tensor(name, kind), tensor)
    assert torch.equal(opened.rng(0)["host"], torch.zeros(4))
    assert opened.rng(1) == {}
    assert len(list(folder.glob("state-*"))) == (4 if shard_bytes == 1 else 1)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    opened = Checkpoint(write(tmp_path / "step-00000003"))
    with pytest.raises(
        AnygaugeError, match=r"no exp_avg_sq of layer\.0\.weight; kept there: .*exp_avg"
    ):
        opened.tensor("layer.0.weight", "exp_avg_sq")


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    earlier = write(tmp_path / "step-00000002")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(AnygaugeError, match="cannot be written"):
            write_checkpoint(tmp_path / "step-00000003", exported(10_000), RECORD, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert find_defect(earlier) is None


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-00000003")
    (folder / "stray").touch()
    write(folder)
    assert find_defect(folder) is None
    assert not (folder / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_folder_that_is_named_must_be_sound(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoints" / "step-00000003")
    found = find_checkpoint(str(folder), tmp_path, 0, ALONE).checkpoint
    assert found is not None and found.step == 3
    with pytest.raises(
        AnygaugeError, match=r"not a sound checkpoint: manifest.json.*step-00000003"
    ):
        find_checkpoint(str(tmp_path), tmp_path, 0, ALONE)


def test_auto_without_any_checkpoint_begins_anew(tmp_path: Path) -> None:
    found = find_checkpoint("auto", tmp_path, 0, ALONE)
    assert (found.checkpoint, found.skipped) == (None, ())


def manager(folder: Path, **section: Any) -> Any:
    return a_manager(folder, section)


def kept(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, every=2, keep_last=2)
    for step in range(1, 8):
        checkpoints.maybe_save(step, last=step == 7, stop=False, loss=None)
    assert kept(tmp_path) == [6, 7]


def test_the_best_are_kept_besides_also_after_a_resume(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 4.0, 6: 5.0, 7: 0.5}
    for half in (range(1, 4), range(4, 8)):
        checkpoints = manager(tmp_path, every=2, keep_last=1, keep_best=2)
        checkpoints.scan()
        for step in half:
            checkpoints.maybe_save(step, last=False, stop=False, loss=losses[step])
    # 2 and 7 are the best; 7 is the newest as well.
    assert kept(tmp_path) == [2, 7]


def test_a_request_to_end_writes_a_checkpoint_though_none_is_due(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    checkpoints.maybe_save(4, last=False, stop=False, loss=1.0)
    assert not (tmp_path / "checkpoints").exists()
    checkpoints.maybe_save(5, last=False, stop=True, loss=None)
    assert kept(tmp_path) == [5]


def test_an_adapter_gets_one_when_it_is_time_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = manager(tmp_path)
    assert not checkpoints.overdue()
    checkpoints.maybe_save(1, last=True, stop=False, loss=None)
    assert not (tmp_path / "checkpoints").exists()
    checkpoints.by_default = True
    checkpoints.maybe_save(2, last=False, stop=False, loss=None)
    checkpoints.maybe_save(3, last=True, stop=False, loss=None)
    assert kept(tmp_path) == [3] and not checkpoints.overdue()
    monkeypatch.setattr(module, "USUAL_S", 0.0)
    assert checkpoints.overdue()
    checkpoints.rank = 1
    assert not checkpoints.overdue(), "the clock of rank 0 decides"
    checkpoints.rank = 0
    checkpoints.asked = True
    checkpoints.maybe_save(4, last=False, stop=False, loss=None)
    assert kept(tmp_path) == [3, 4] and not checkpoints.asked


def test_a_request_is_answered_once_or_refused_with_the_reason(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = a_manager(tmp_path, {"every": 0}, log=said.append)
    checkpoints.engine.refuses_checkpoints = ""
    request = tmp_path / module.REQUEST
    assert not checkpoints.overdue()
    request.touch()
    assert checkpoints.overdue()
    checkpoints.maybe_save(1, last=False, stop=False, loss=None)
    assert request.exists(), "the ranks have not agreed yet"
    checkpoints.asked = True
    checkpoints.maybe_save(2, last=False, stop=False, loss=None)
    assert not request.exists() and kept(tmp_path) == [2]
    request.touch()
    checkpoints.maybe_save(3, last=False, stop=True, loss=None)
    assert request.exists(), "it came after rank 0 had looked"
    checkpoints.engine.refuses_checkpoints = "it keeps no masters"
    assert not checkpoints.overdue() and not request.exists()
    assert said[-1] == "checkpoint-now: this run cannot write checkpoints: it keeps no masters"


def test_ranks_agree_on_the_time_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USUAL_S", 0.0)
    keep = {"checkpoint": {"keep_last": 9}, "strategy": {"name": "single"}}
    run = trained_here(run_file(tmp_path, train={"steps": 3}, **keep))
    assert kept(run.folder) == [1, 2, 3]
