"""A finished run stays what it is; tests/cli/test_resume_refusals.py has
what the command itself sees.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import ATTEMPTS, RunFileError
from anygauge.training.checkpoints.identity import changed_settings, check_length, finished_run
from tests.helpers.runs import Run, hashes, run_file, train

SINGLE: dict[str, Any] = {"strategy": {"name": "single"}}


def without_start(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not name.startswith(f"{ATTEMPTS}/")}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The run file and the run: finished, with a checkpoint of its middle alone."""
    folder = tmp_path_factory.mktemp("finished")
    file = run_file(folder, train={"steps": 4, "eval_at_start": False}, **SINGLE)
    run = train(file, "--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=9")
    assert run.status == 0, run.err
    assert f"run: {run.folder}\n" in run.out
    shutil.rmtree(run.folder / "checkpoints/step-00000004")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run.folder / "adapter").iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]
    return file, run


@pytest.mark.slow
def test_a_refused_resume_changes_nothing(done: tuple[Path, Run]) -> None:
    """By the ranks, which alone know the rows; the other refusals are in `test_resume`."""
    file, run = done
    before = without_start(hashes(run.folder))
    refused = train(file, "--resume", "auto", "--set", "data.max_length=80")
    assert refused.status == 2, refused.out + refused.err
    assert "data and its order" in refused.err
    assert without_start(hashes(run.folder)) == before
    assert [path.name for path in run.folder.parent.iterdir()] == [run.folder.name]
    (attempt,) = (run.folder / ATTEMPTS).iterdir()
    logs = attempt / "logs"
    assert (logs / "rank0.log").exists() and f"logs: {logs}" in refused.err


@pytest.mark.slow
def test_ranks_too_say_that_it_is_finished(done: tuple[Path, Run]) -> None:
    """Settings that may change and leave nothing to do: only the ranks know that."""
    file, run = done
    before = without_start(hashes(run.folder))
    again = train(file, "--resume", "auto", "--set", "train.optimizer.lr=0.5")
    assert again.status == 0, again.err
    assert "finished: this run has already finished after 4 steps" in again.out
    assert hashes(run.folder) == before, "and what waited is removed"


@pytest.mark.slow
def test_more_steps_go_on_from_the_end_alone(done: tuple[Path, Run], tmp_path: Path) -> None:
    """The accepted start has logs of its own; the run directory names its run file."""
    file = run_file(tmp_path, train={"steps": 2}, checkpoint={"every": 1}, **SINGLE)
    assert train(file).status == 0
    longer = train(file, "--resume", "auto", "--set", "train.steps=3")
    assert longer.status == 0, longer.err
    assert "step-00000002 (2 steps done)" in longer.out
    assert json.loads((longer.folder / "report.json").read_text())["steps"] == 3
    assert yaml.safe_load((longer.folder / "run.yaml").read_text())["train"]["steps"] == 3
    (attempt,) = (longer.folder / ATTEMPTS).iterdir()
    for start in (longer.folder, attempt):
        assert {path.name for path in (start / "logs").iterdir()} == {"supervisor.log", "rank0.log"}
        assert json.loads((start / "ranks/rank0.json").read_text())["state"] == "ok"
    assert json.loads((attempt / "job.json").read_text())["run_file"] == str(attempt / "run.json")
    assert longer.steps("loss") and len(longer.steps("loss")) == 3


def report(folder: Path) -> Path:
    (folder / "adapter").mkdir(parents=True)
    text = json.dumps({"steps": 4, "saved": "/elsewhere/adapter"})
    (folder / "report.json").write_text(text)
    return folder


def test_a_report_that_is_sound_means_finished(tmp_path: Path) -> None:
    found = finished_run(report(tmp_path / "run"))
    assert found is not None
    assert (found.steps, found.result) == (4, tmp_path / "run/adapter")


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({"steps": n, "saved": "/elsewhere/adapter"}) for n in ("4", None)),
        *(json.dumps({"steps": 4, "saved": saved}) for saved in (3, "x/..", "model")),
        *("[]", "", "[" * 100_000, '{"steps": NaN}'),
    ],
    ids=range(9),
)
def test_a_report_that_is_not(text: str, tmp_path: Path) -> None:
    (report(tmp_path) / "report.json").write_text(text)
    assert finished_run(tmp_path) is None


def test_a_run_is_extended_from_its_end_alone(tmp_path: Path) -> None:
    found = finished_run(report(tmp_path / "run"))
    assert found is not None
    assert check_length(found, 4, None, {}) is True
    assert check_length(found, 8, 4, {}) is False
    with pytest.raises(RunFileError, match=r"8 are requested.*its newest sound one is of step 2"):
        check_length(found, 8, 2, {})
    with pytest.raises(RunFileError, match=r"it has none"):
        check_length(found, 8, None, {})
    with pytest.raises(RunFileError, match=r"cannot be made shorter"):
        check_length(found, 2, 4, {})


def test_what_changed_since_is_named_but_for_options_of_the_other_strategy() -> None:
    kept = {"strategy.name": "ddp", "strategy.tp": 2, "train.steps": 4, "precision": "auto"}
    now = {"strategy.name": "zero", "strategy.stage": 3, "train.steps": 6, "precision": "auto"}
    assert changed_settings(kept, now) == ["strategy.name: ddp -> zero", "train.steps: 4 -> 6"]
