"""The parts of `make gpu` on a host, at sizes at which it is done in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernel_timings
from benchmarks.contender_processes import Processes
from benchmarks.gpu import time_operations, training
from benchmarks.gpu.part import FAILED, LATE, PARTS, Context, PartError, Report, names
from tests.benchmarks.commands import run
from tests.helpers.gaudi import calls
from tests.helpers.nvidia import NAME, built, standin_environment, standin_site


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``make gpu``, without it."""
    variables = {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder.parent)}
    return run("benchmarks.gpu", "--output", folder, *arguments, **variables)


def measured(folder: Path, parts: str, *arguments: str) -> dict[str, dict[str, Any]]:
    done = command(folder, "--device", "cpu", "--parts", parts, "--seconds", "900", *arguments)
    record = json.loads((folder / "results.json").read_text())
    found = {part["part"]: part for part in record["parts"]}
    assert done.returncode == 0, done.stdout + done.stderr + str(found)
    assert list(found) == [name for name in PARTS if name in parts.split(",")]
    assert {part["status"] for part in found.values()} == {"ok"}
    return found


def test_operations_and_the_kit(tmp_path: Path) -> None:
    found = measured(tmp_path / "gpu", "accuracy,loss,kit")
    errors = [row["figures"] for row in found["accuracy"]["rows"]]
    assert len(errors) == 12
    assert all(0 < e["error of the gradient"] < e["gradient, allowed"] for e in errors)
    compared = [row["name"] for row in found["loss"]["rows"]]
    assert compared == ["anygauge, chunked", "torch", "torch.compile"]
    assert all(row["figures"]["forward, ms"] > 0 for row in found["loss"]["rows"])
    assert found["kit"]["rows"][0]["figures"] == {"passed": 1}
    page = (tmp_path / "gpu" / "page.md").read_text()
    for part in found.values():
        assert f"## {part['title']}" in page
    assert (tmp_path / "gpu" / "kit" / "conformance.md").is_file()


def test_a_kernel_is_as_exact_as_torchs_own_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many classes, bfloat16's logits alone put any gradient off by a few per cent."""
    host = torch.device("cpu")
    loss = kernel_timings.plain_loss
    assert time_operations.errors_of(loss, loss, 32_000, torch.bfloat16, host)[1] > 0.02
    fitting = kernel_timings.fitting_kernels

    def off(operation: str, device: torch.device) -> Any:
        found = fitting(operation, device)
        return {name: lambda *given, k=k: k(*given) * 1.05 for name, k in found.items()}

    where = Context(device="cpu", folder=str(tmp_path), seconds=60.0, tiny=True)
    time_operations.accuracy(where, Report(tmp_path / "report.json"))
    monkeypatch.setattr(kernel_timings, "fitting_kernels", off)
    with pytest.raises(PartError, match="chunked, linear_cross_entropy, float32, 90") as raised:
        time_operations.accuracy(where, Report(tmp_path / "report.json"))
    assert raised.value.status == FAILED


RUN = """
import json, sys, time
folder, dtype, device, last = sys.argv[1:]
time.sleep({"float32": 0, "bfloat16": 60}[dtype])
losses = [3.0, 2.0 if device == "cpu" else float(last)]
with open(folder + "/metrics.jsonl", "w") as file:
    file.writelines(json.dumps({"loss": loss, "grad_norm": 1.0}) + "\\n" for loss in losses)
"""


@pytest.mark.parametrize(("last", "status"), [("2.001", LATE), ("2.1", FAILED), ("x", FAILED)])
def test_parity_keeps_what_is_done_when_its_time_is_over(
    last: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleeper(folder: Path, plan: Any, dtype: str, device: str) -> Processes:
        where = folder / f"{device}-{dtype}"
        where.mkdir()
        argv = [sys.executable, "-c", RUN, str(where), dtype, device, last]
        return Processes(argv=argv, environments=[{}], logs=[where / "run.log"])

    monkeypatch.setattr(training, "parity_run", sleeper)
    report = Report(tmp_path / "report.json")
    with pytest.raises(PartError) as raised:
        training.parity(Context(device="cuda", folder=str(tmp_path), seconds=8.0), report)
    assert raised.value.status == status
    rows = {(row.case, row.name): row for row in report.rows}
    assert rows["bfloat16", "run on cpu"].note == LATE
    if last == "x":
        assert "ValueError: could not convert" in rows["float32", "run on cuda"].note
    else:
        off = rows["float32", "loss"].figures["largest difference"]
        assert off == pytest.approx(float(last) / 2 - 1)
        assert rows["float32", "grad_norm"].figures["largest difference"] == 0


@pytest.mark.slow
def test_all_of_the_quick_parts(tmp_path: Path) -> None:
    found = measured(tmp_path / "gpu", ",".join(names(full=False)))
    losses = [row for row in found["parity"]["rows"] if row["name"] == "loss"]
    assert losses[0]["figures"]["largest difference"] == 0
    ours, theirs, *others = found["training"]["rows"]
    assert (ours["name"], theirs["name"]) == ("anygauge, single", "HF Trainer")
    assert [row["case"] for row in others] == ["padded", "packed"]
    for row in (ours, theirs, *others):
        assert row["figures"]["tokens/s"] > 0
        assert 0 < row["figures"]["device busy"] <= 1
        assert row["figures"]["host waits per step"] is None
    assert ours["figures"]["last loss"] == pytest.approx(theirs["figures"]["last loss"], rel=1e-2)
    assert ours["predicted"]["peak memory, GiB"] > 0


@pytest.mark.slow
def test_all_of_the_others(tmp_path: Path) -> None:
    rest = [name for name in PARTS if not PARTS[name].quick]
    found = measured(tmp_path / "gpu", ",".join(rest), "--full", "--gpus", "2")
    shown = [row["name"] for row in found["sharded"]["rows"]]
    assert shown == ["anygauge, ddp", "DDP, by hand"]
    assert all(row["figures"] or row["note"] for part in found.values() for row in part["rows"])


@pytest.mark.slow
@pytest.mark.skipif(built() is None, reason="make plugins builds the simulated cards")
def test_the_parts_on_the_stand_in_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a card alone has: its description, Triton's kernels, memory and the mode of waits."""
    record = tmp_path / "record"
    for name, value in standin_environment(standin_site(tmp_path), record).items():
        monkeypatch.setenv(name, value)
    # Nothing is compiled for a card that is simulated.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    parts = "accuracy,loss,training"
    done = command(tmp_path / "gpu", "--tiny", "--seconds", "900", "--parts", parts)
    record_of = json.loads((tmp_path / "gpu" / "results.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr + str(record_of)
    assert record_of["machine"]["card"] == NAME
    found = {part["part"]: part for part in record_of["parts"]}
    names_of = {row["name"] for row in found["accuracy"]["rows"]}
    assert names_of == {"torch", "reference", "triton", "chunked"}
    ours, theirs = found["training"]["rows"][:2]
    for row in (ours, theirs):
        assert row["figures"]["host waits per step"] == 0  # the stand-in warns of none
        assert 0 < row["figures"]["device busy"] <= 1 and row["note"] == ""
    # Tensors alone are planned and counted: no library's memory.
    memory = "peak memory, GiB"
    assert ours["figures"][memory] == pytest.approx(ours["predicted"][memory], rel=0.05)
    assert ours["predicted"]["tokens/s"] > 0
    modes = [call[1] for call in calls(record, 0) if call[0] == "set_sync_debug_mode"]
    assert modes == [1, 0] * 4  # torch's numbers for warn and default, of each contender


def test_a_card_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    done = command(tmp_path / "gpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no NVIDIA card to measure")
    assert "DEVICE=cpu" in done.stderr and "PREDICT=" in done.stderr
    assert not (tmp_path / "gpu").exists()


@pytest.mark.slow
def test_predictions_need_no_card(tmp_path: Path) -> None:
    done = command(tmp_path / "gpu", "--predict", "h100:1", "--parts", "training,8b")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu" / "results.json").read_text())
    rows = [row for part in record["parts"] for row in part["rows"]]
    single = "anygauge, single"
    assert [row["name"] for row in rows] == [single, single, f"{single}, packing", single]
    for row in rows:
        assert row["figures"] == {} and 0 < row["predicted"]["MFU"] < 1
