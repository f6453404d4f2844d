"""What is refused or done already before ranks start; a run and its dry run say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.interface import AnygaugeError, RunFileError
from anygauge.launch import prepare
from anygauge.launch.request import read_request
from anygauge.training.checkpoints.identity import identity_of_file
from tests.helpers.checkpoints import RECORD, write
from tests.helpers.runs import hashes, run_file, trained_here

BOTH = pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model and rows were looked at")

    monkeypatch.setattr(prepare, "prepare", looked)


def identity(path: Path) -> dict[str, Any]:
    return identity_of_file(read_request(path, [], {}, need_device=False).run)


@BOTH
def test_a_run_that_is_done(
    dry: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, strategy={"name": "single"}, train={"steps": 2})
    folder = trained_here(path).folder
    before = hashes(folder)
    capsys.readouterr()
    assert command(["train", str(path), "--resume", "auto", *dry]) == 0
    assert capsys.readouterr().out == (
        f"finished: this run has already finished after 2 steps; result: {folder / 'adapter'}\n"
    )
    with pytest.raises(RunFileError, match=r"belongs to another run: train.seed \(before: 0; now"):
        command(["train", str(path), "--resume", "auto", "--set", "train.seed=5", *dry])
    assert hashes(folder) == before
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


@BOTH
def test_a_named_folder_that_is_no_checkpoint(dry: list[str], tmp_path: Path) -> None:
    path = run_file(tmp_path)
    sound = write(tmp_path / "old/checkpoints/step-00000003")
    torn = write(tmp_path / "old/checkpoints/step-00000004")
    (torn / "state-00001.safetensors").write_bytes(b"")
    for folder, complaint in (
        (tmp_path / "old", rf"manifest.json: No such file .* near it: {torn}, {sound}"),
        (torn, r"state-00001.safetensors has 0 bytes"),
    ):
        with pytest.raises(AnygaugeError, match=f"--resume {folder} is not a sound .*{complaint}"):
            command(["train", str(path), "--resume", str(folder), *dry])
    assert not (tmp_path / "out").exists()


@BOTH
def test_a_named_checkpoint_of_another_run(
    dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_file(tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(RECORD, "identity", identity(path))
        folder = write(tmp_path / "old/checkpoints/step-00000003")
    with pytest.raises(RunFileError, match=r"belongs to another run: train.seed \(before: 0; now"):
        command(["train", str(path), "--resume", str(folder), "--set", "train.seed=5", *dry])
    with pytest.raises(AssertionError, match="were looked at"):  # it is accepted so far
        command(["train", str(path), "--resume", str(folder), *dry])
    assert not (tmp_path / "out").exists()
