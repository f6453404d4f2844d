"""What happens to a run's folder while it trains: moved, removed, taken by another run, full."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import AnygaugeError
from anygauge.launch.run_directory import lock_folder
from anygauge.training.step_results import MetricsLogger
from anygauge.util.events import EventWriter
from tests.helpers.runs import run_file, trained_here


def at(monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[[int], None]) -> None:
    """Have something happen after each call of a method of the logger, with the call's number."""
    usual, calls = getattr(MetricsLogger, method), iter(range(1, 100))

    def call(self: MetricsLogger, *args: Any, **given: Any) -> None:
        usual(self, *args, **given)
        fault(next(calls))

    monkeypatch.setattr(MetricsLogger, method, call)


def tiny(folder: Path, **changes: Any) -> Path:
    return run_file(folder, strategy={"name": "single"}, **changes)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("method", "every", "lacks"),
    [("step", 4, "checkpoints"), ("step", 0, "adapter"), ("close", 0, "report.json")],
    ids=["checkpoint", "result", "report"],
)
def test_a_run_whose_folder_became_another_runs_writes_nothing_there(
    method: str, every: int, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path, checkpoint={"every": every})
    folder, moved = tmp_path / "out" / "tiny", tmp_path / "moved"
    last = 4 if method == "step" else 1
    there: set[str] = set()

    def restart(call: int) -> None:
        if call == last:
            folder.rename(moved)
            with lock_folder(folder):
                (folder / "run.yaml").write_text("of the other run")
            there.update(files_in(folder))

    at(monkeypatch, method, restart)
    said = f"{folder} is not this run's folder any more: it was moved .* another run was started"
    with pytest.raises(AnygaugeError, match=said) as error:
        trained_here(path)
    assert error.value.exit_status == 1
    assert files_in(folder) == there == {".lock", "run.yaml"}
    assert lacks not in files_in(moved) and "metrics.jsonl" in files_in(moved)


def test_a_run_does_not_make_its_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path, checkpoint={"every": 2})
    folder = tmp_path / "out" / "tiny"
    at(monkeypatch, "step", lambda call: shutil.rmtree(folder) if call == 2 else None)
    with pytest.raises(AnygaugeError, match="it was moved or removed while the run was going on"):
        trained_here(path)
    assert not folder.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here: that needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("freed", [True, False])
def test_a_full_disk_costs_no_step(
    freed: bool, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path, output=str(small_disk), train={"steps": 5})
    ballast = small_disk / "ballast"
    said: list[str] = []
    monkeypatch.setattr(EventWriter, "message", lambda _, text, level="info": said.append(text))

    def fill(call: int) -> None:
        if call == 2:
            # A page that is there has room for lines, so it is filled first.
            metrics = small_disk / "tiny" / "metrics.jsonl"
            with metrics.open("a") as lines:
                room = (4080 - metrics.stat().st_size) % 4096
                lines.write(json.dumps({"padding": "x" * room}) + "\n")
            with pytest.raises(OSError, match="No space"), ballast.open("wb", 0) as file:
                while file.write(bytes(4096)):
                    pass
        elif call == (4 if freed else 5):
            ballast.unlink()

    at(monkeypatch, "step", fill)
    run = trained_here(path)
    assert sum("metrics.jsonl cannot be written now: No space left" in text for text in said) == 1
    assert (run.folder / "adapter" / "adapter_model.safetensors").is_file()
    assert run.steps("step") == [1, 2, 3, 4, 5]


def test_durations_do_not_follow_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    run = trained_here(tiny(tmp_path))
    report = json.loads((run.folder / "report.json").read_text())
    assert 0 < report["start_s"] < report["seconds"] < 1000
