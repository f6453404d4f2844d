"""``--profile``: which steps are recorded, what is written, and that a run survives it."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli.shared_options import read_steps
from anygauge.interface import Placement, UsageError
from anygauge.training.profiled_steps import StepProfiler
from anygauge.training.progress import Progress
from anygauge.util.events import EventWriter
from tests.helpers.runs import run_file, trained


class Recorded(Placement):
    """Writes down when a recording begins and ends."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("cpu")
        self.seen: list[Any] = []
        self._error = error

    @contextlib.contextmanager
    def profile(self, folder: Path) -> Iterator[None]:
        assert folder.is_dir()
        self.seen.append("begin")
        yield
        self.seen.append("end")
        if self._error is not None:
            raise self._error


def profiler(
    placement: Placement, steps: range, folder: Path, logged: list[tuple[str, str]]
) -> StepProfiler:
    return StepProfiler(
        placement=placement,
        progress=Progress(EventWriter(None)),
        steps=steps,
        folder=folder,
        rank=0,
        log=lambda text, level: logged.append((text, level)),
    )


@pytest.mark.parametrize(
    ("steps", "trained_from", "seen"),
    [
        (range(1, 3), 0, [0, "begin", 1, 2, "end", 3]),
        (range(0, 1), 0, ["begin", 0, "end", 1, 2, 3]),
        (range(2, 9), 0, [0, 1, "begin", 2, 3, "end"]),
        (range(1, 3), 2, ["begin", 2, "end", 3]),
        (range(0, 0), 0, [0, 1, 2, 3]),
    ],
)
def test_the_steps_that_were_named_are_recorded(
    steps: range, trained_from: int, seen: list[Any], tmp_path: Path
) -> None:
    placement, logged = Recorded(), []
    for index in profiler(placement, steps, tmp_path, logged).over(range(trained_from, 4)):
        placement.seen.append(index)
    assert placement.seen == seen
    home = tmp_path / "profile" / f"{steps.start + 1}-{steps.stop}"
    assert logged == ([(f"profile: {home}", "info")] if steps else [])
    assert (home / "rank0").is_dir() is bool(steps)


def test_a_loop_that_is_left_early_ends_the_recording(tmp_path: Path) -> None:
    placement = Recorded()

    def loop() -> None:
        for index in profiler(placement, range(1, 9), tmp_path, []).over(range(9)):
            placement.seen.append(index)
            if index == 2:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        loop()
    assert placement.seen == [0, "begin", 1, 2, "end"]


def test_a_recording_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    placement, logged = Recorded(OSError("No space left on device")), []
    assert [*profiler(placement, range(1), tmp_path, logged).over(range(3))] == [0, 1, 2]
    ((text, level),) = logged
    assert level == "warning"
    assert text.startswith("the profile cannot be written: OSError: No space left on device")


def test_steps_that_are_not_trained_are_refused(tmp_path: Path) -> None:
    recorder = profiler(Recorded(), range(4, 6), tmp_path, [])
    for start, end in ((0, 5), (5, 9), (0, 100)):
        recorder.check(start, end)
    for start, end in ((0, 4), (6, 9)):
        with pytest.raises(UsageError, match=rf"^--profile 5:6: .* steps {start + 1} to {end}\."):
            recorder.check(start, end)


def test_the_option() -> None:
    assert read_steps(None) == (0, 0)
    assert read_steps("5:5") == (4, 5)
    assert read_steps("1:20") == (0, 20)
    for wrong in ("5", "0:3", "5:4", "a:b", "1:2:3", "-1:2", "1:", ":", "", "1:99999999999", "٣:٤"):
        with pytest.raises(UsageError, match="such as 5:8"):
            read_steps(wrong)


def test_a_run_writes_a_timeline_and_what_memory_held(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": 4, "gradient_checkpointing": False})
    run = trained(path, "--profile", "2:3", "--no-plan")
    assert [step for step in run.steps("step")] == [1, 2, 3, 4]
    assert f"profile: {run.folder}/profile/2-3" in run.out
    own = run.folder / "profile/2-3/rank0"
    assert {each.name for each in own.iterdir()} == {"trace.json.gz", "memory.json"}
    with gzip.open(own / "trace.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    assert "aten::mm" in names
    memory = json.loads((own / "memory.json").read_text())
    assert memory["before"]["kind"] == memory["after"]["kind"] == "process"
    sizes = [each["bytes"] for each in memory["host_operations"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert memory["device_operations"] == []
