"""Trackers and system metrics in real runs: what comes out, and that it ends with the run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import NonFiniteLossError
from tests.helpers.runs import Run, run_file, trained_here

LINES = "lines.jsonl"


def shipped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LINES).read_text().splitlines()]


def background() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("tracker-", "system-metrics"))]


def tracked(folder: Path, **changes: Any) -> Run:
    lines = {"jsonl": {"path": str(folder / LINES)}}
    asked = {"strategy": {"name": "single"}, "trackers": ["jsonl"], "tracker_options": lines}
    return trained_here(run_file(folder, **asked, **changes))


def test_everything_reaches_a_tracker(tmp_path: Path) -> None:
    train = {"system_every_s": 0.05, "optimizer": {"name": "lion", "loraplus_lr_ratio": 4}}
    run = tracked(tmp_path, data={"eval_fraction": 0.2}, train=train)
    assert not background()
    *records, last = shipped(tmp_path)
    assert [r["train/loss"] for r in records if "train/loss" in r] == run.steps("loss")
    assert [r["eval/loss"] for r in records if "eval/loss" in r] == run.evaluations()
    assert last["status"] == "finished"
    assert last["summary"]["final_loss"] == run.steps("loss")[-1]
    assert last["summary"]["eval_loss"] == run.evaluations()[-1]
    samples = [r for r in run.records if "system" in r]
    assert samples and all(set(r) == {"time", "system"} for r in samples)
    assert [s["time"] for s in samples] == sorted(s["time"] for s in samples)
    for name, value in samples[-1]["system"].items():
        assert [r for r in records if r.get(f"system/{name}") == value], name


def test_a_run_that_fails_is_closed_as_failed(tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "lr": 1e6}
    with pytest.raises(NonFiniteLossError):
        tracked(
            tmp_path,
            adapter=None,
            train={"system_every_s": 0, "max_grad_norm": 0, "optimizer": optimizer},
        )
    assert not background()
    *records, last = shipped(tmp_path)
    assert (last["status"], last["summary"]) == ("failed", {})
    assert records and not any(key.startswith("system/") for r in records for key in r)


@pytest.mark.parametrize("function", ["save.save_result", "save.used_versions"])
def test_a_run_that_cannot_write_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Its result at the end; its versions before the first step."""

    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(f"anygauge.training.{function}", full_disk)
    with pytest.raises(OSError, match="no space left"):
        tracked(tmp_path)
    assert shipped(tmp_path)[-1]["status"] == "failed"
