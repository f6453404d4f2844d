"""Each tracker really writes, and what it wrote is read back; nothing leaves this machine."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import AnygaugeError, NotAvailableError, Options, TrackerContext
from anygauge.training.trackers.services import (
    JsonLinesFile,
    MLflow,
    TensorBoard,
    WeightsAndBiases,
    keep_id,
    kept_id,
)
from anygauge.training.trackers.tracker_options import JsonLinesOptions, MLflowOptions, WandbOptions

ROOT = Path(__file__).parents[2]
PARAMETERS = {"train.seed": 3, "adapter": None, "name": "tiny"}


def context(
    folder: Path, kind: type[Options] = Options, *, resumed: int | None = None, **options: Any
) -> TrackerContext:
    return TrackerContext(
        run_directory=folder,
        run_name="tiny",
        options=kind(**options),
        parameters=PARAMETERS,
        resumed_from_step=resumed,
    )


# -- jsonl ------------------------------------------------------------------------------------


def test_jsonl_appends_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "ship" / "lines.jsonl"
    for resumed in (None, 1):
        tracker = JsonLinesFile(
            context(tmp_path, JsonLinesOptions, resumed=resumed, path=str(path))
        )
        tracker.log(1, {"train/loss": 2.5, "train/grad_norm": math.inf})
        assert path.read_text().endswith("\n"), "a reader sees whole lines at once"
        tracker.close("finished", {"final_loss": 2.5})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 4
    assert records[0]["train/loss"] == 2.5 and records[0]["train/grad_norm"] is None
    assert (records[0]["step"], records[0]["run"]) == (1, "tiny")
    assert (records[1]["status"], records[1]["summary"]) == ("finished", {"final_loss": 2.5})


def test_jsonl_is_in_the_run_directory_where_the_path_is_relative(tmp_path: Path) -> None:
    JsonLinesFile(context(tmp_path, JsonLinesOptions, path="x.jsonl")).close("failed", {})
    assert json.loads((tmp_path / "x.jsonl").read_text())["status"] == "failed"


def test_jsonl_says_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AnygaugeError, match=r"jsonl\.path: cannot append to .*file/x"):
        JsonLinesFile(context(tmp_path, JsonLinesOptions, path="file/x"))


# -- kept ids ---------------------------------------------------------------------------------


def test_an_id_is_kept_and_a_damaged_file_has_none(tmp_path: Path) -> None:
    run = context(tmp_path)
    assert kept_id(run, "some") is None
    keep_id(run, "some", "abc")
    assert kept_id(run, "some") == "abc"
    for damaged in ("", "{", "[]", '{"id": 3}'):
        (tmp_path / "some-run.json").write_text(damaged)
        assert kept_id(run, "some") is None


# -- tensorboard ------------------------------------------------------------------------------


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(context(tmp_path))
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    first.close("stopped", {})
    second = TensorBoard(context(tmp_path, resumed=2))
    second.log(3, {"train/loss": 30.0, "eval/loss": 7.0})
    second.close("finished", {"final_loss": 30.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 7)]
    (parameters,) = events.Tensors("parameters/text_summary")
    assert b"| train.seed | 3 |" in parameters.tensor_proto.string_val[0]
    summary = events.Tensors("summary/text_summary")[-1]
    assert b"| final_loss | 30.0 |" in summary.tensor_proto.string_val[0]


# -- mlflow -----------------------------------------------------------------------------------


def test_mlflow_keeps_one_run_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    options = {"tracking_uri": (tmp_path / "store").as_uri(), "experiment": "mine"}
    first = MLflow(context(tmp_path, MLflowOptions, **options))
    first.log(1, {"train/loss": 3.0, "system/host_busy_percent": 5.0})
    first.log(2, {"train/loss": 2.0})
    client = MlflowClient(tracking_uri=options["tracking_uri"])
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (running,) = client.search_runs([experiment.experiment_id])
    assert running.info.status == "RUNNING"
    first.close("stopped", {})
    second = MLflow(context(tmp_path, MLflowOptions, resumed=1, **options))
    second.log(2, {"train/loss": 1.5})
    second.log(3, {"train/loss": 1.0})
    second.close("finished", {"final_loss": 1.0})
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.params == {"train.seed": "3", "adapter": "None", "name": "tiny"}
    assert run.data.metrics["summary/final_loss"] == 1.0
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == [(1, 3.0), (2, 1.5), (2, 2.0), (3, 1.0)]
    failed = MLflow(context(tmp_path, MLflowOptions, **options))
    failed.close("failed", {})
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def test_mlflow_without_a_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(NotAvailableError, match="no server or store is set"):
        MLflow(context(tmp_path, MLflowOptions))


# -- wandb ------------------------------------------------------------------------------------


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of an offline run: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items}
                rows.append({k: v for k, v in row.items() if not k.startswith("_")})
    return rows


def test_wandb_offline_holds_everything(tmp_path: Path) -> None:
    options = {"mode": "offline", "project": "p", "tags": ["a", "b"], "name": "other"}
    first = WeightsAndBiases(context(tmp_path, WandbOptions, **options))
    first.log(1, {"train/loss": 3.0})
    first.log(2, {"train/loss": 2.0, "system/host_busy_percent": 5.0})
    first.close("stopped", {})
    kept = kept_id(context(tmp_path), "wandb")
    second = WeightsAndBiases(context(tmp_path, WandbOptions, resumed=1, **options))
    second.log(2, {"train/loss": 1.5})
    second.close("failed", {"final_loss": 1.5})
    # What finish() leaves to wandb's own process is on the disk a moment later.
    until = time.monotonic() + 30
    while len(history(tmp_path)) < 3 and time.monotonic() < until:
        time.sleep(0.2)
    assert history(tmp_path) == [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 2.0, "system/host_busy_percent": 5.0},
        {"step": 2, "train/loss": 1.5},
    ]
    records = [
        record
        for path in tmp_path.glob("wandb/offline-run-*/*.wandb")
        for record in wandb_records(path)
    ]
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(r.run_id, r.project, r.display_name) for r in runs} == {(kept, "p", "other")}
    assert {tuple(r.tags) for r in runs} == {("a", "b")}
    config = {u.key: u.value_json for r in runs for u in r.config.update}
    assert config["train.seed"] == "3"
    codes = sorted(r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit")
    assert codes == [0, 1]
    summaries = [
        (i.key, json.loads(i.value_json))
        for r in records
        if r.WhichOneof("record_type") == "summary"
        for i in r.summary.update
    ]
    assert ("final_loss", 1.5) in summaries and ("status", "failed") in summaries


def test_wandb_without_a_login_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NotAvailableError, match=r"not logged in to api\.wandb\.ai"):
        WeightsAndBiases(context(tmp_path, WandbOptions))


# -- every service, in a process of its own -----------------------------------------------------


def trackio_steps(folder: Path) -> Any:
    with sqlite3.connect(folder / "trackio/anygauge.db") as db:
        return sorted(db.execute("SELECT run_name, step FROM metrics").fetchall())


def aim_runs(folder: Path) -> Any:
    with sqlite3.connect(folder / "aim/.aim/run_metadata.sqlite") as db:
        return db.execute("SELECT hash, name FROM run").fetchall()


def dvclive_steps(folder: Path) -> Any:
    return " ".join((folder / "dvclive/plots/metrics/train/loss.tsv").read_text().split())


Service = tuple[dict[str, Any], Any, Any]
OURS: dict[str, Service] = {
    "tensorboard": ({}, None, None),
    "wandb": ({"mode": "offline"}, None, None),
    "mlflow": ({"tracking_uri": "STORE"}, None, None),
}
OTHERS: dict[str, Service] = {
    "trackio": ({}, trackio_steps, [("tiny", step) for step in (1, 2, 2, 2, 3, 3)]),
    "swanlab": ({"mode": "offline"}, None, None),
    "comet_ml": ({"online": False}, None, None),
    "aim": ({}, aim_runs, [("ID", "tiny")]),
    "clearml": ({}, None, None),
    "dvclive": ({}, dvclive_steps, "step loss 1 1.0 2 2.0 2 12.0 3 13.0"),
}


@pytest.mark.parametrize("services", [OURS, *({n: OTHERS[n]} for n in OTHERS)], ids="+".join)
def test_no_service_starts_a_process_group_or_sets_a_device(
    services: dict[str, Service], tmp_path: Path
) -> None:
    """And a run that is resumed goes on in the same run of the service."""
    for name in services:
        pytest.importorskip(name)
    store = (tmp_path / "store").as_uri()
    options = {name: given for name, (given, *_) in services.items()}
    given = json.dumps(options).replace("STORE", store)
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.tracker_part", tmp_path, given],
        cwd=tmp_path,  # not in a repository of Git, which some change
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path / "home"),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "CLEARML_OFFLINE_MODE": "1",
            "CLEARML_CACHE_DIR": str(tmp_path / "cache"),
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for name, (_, read, wanted) in services.items():
        if read is not None:
            identity = kept_id(context(tmp_path), name)
            assert str(read(tmp_path)) == str(wanted).replace("ID", str(identity))
