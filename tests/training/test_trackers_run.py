"""Trackers and system metrics in real runs: what comes out, and that it ends with the run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import NonFiniteLossError
from tests.helpers.runs import run_file, trained_here


def shipped(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def background() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("tracker-", "system-metrics"))]


def test_everything_reaches_a_tracker(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    run = trained_here(
        run_file(
            tmp_path,
            strategy={"name": "single"},
            data={"eval_fraction": 0.2},
            train={"system_every_s": 0.05, "optimizer": {"name": "lion", "loraplus_lr_ratio": 4}},
            trackers=["jsonl"],
            tracker_options={"jsonl": {"path": str(lines)}},
        )
    )
    assert not background()
    *records, last = shipped(lines)
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
    lines = tmp_path / "lines.jsonl"
    with pytest.raises(NonFiniteLossError):
        trained_here(
            run_file(
                tmp_path,
                strategy={"name": "single"},
                adapter=None,
                train={
                    "system_every_s": 0,
                    "max_grad_norm": 0,
                    "optimizer": {"name": "sgd", "lr": 1e6},
                },
                trackers=["jsonl"],
                tracker_options={"jsonl": {"path": str(lines)}},
            )
        )
    assert not background()
    *records, last = shipped(lines)
    assert (last["status"], last["summary"]) == ("failed", {})
    assert records and not any(key.startswith("system/") for r in records for key in r)


def test_a_run_whose_result_cannot_be_saved_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines.jsonl"

    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("anygauge.training.save.save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        trained_here(
            run_file(
                tmp_path,
                strategy={"name": "single"},
                trackers=["jsonl"],
                tracker_options={"jsonl": {"path": str(lines)}},
            )
        )
    assert shipped(lines)[-1]["status"] == "failed"
