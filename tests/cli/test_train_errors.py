"""Bad input: one clear message, a non-zero exit, no traceback, no hang, nothing half-written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.interface import AnygaugeError
from tests.helpers.runs import anygauge, run_file, train, trained_here

PATIENCE_S = 300
"""For a loaded machine to start two ranks; what is asserted is never how long it took."""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The message of a command that must fail before it starts anything."""
    with pytest.raises(AnygaugeError) as error:
        command([str(a) for a in arguments])
    assert error.value.exit_status != 0
    assert capsys.readouterr().out == ""
    return str(error.value)


def test_missing_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "nothing.yaml" in refused(capsys, "train", tmp_path / "nothing.yaml")


def test_missing_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = run_file(tmp_path, data={"train": {"path": "rows.jsonl"}})
    message = refused(capsys, "train", path)
    assert re.search(r"tiny\.yaml:\d+: data\.train\.path: .*rows\.jsonl", message)


def test_wrong_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = run_file(tmp_path, data={"train": {"prompt": "qestion"}})
    message = refused(capsys, "train", path)
    assert "'qestion'" in message and "prompt, completion" in message


def test_unknown_backend(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, "train", run_file(tmp_path), "--backend", "cdua")
    assert "'cdua'" in message and "did you mean" in message and "cpu" in message


def test_backend_without_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    probed = subprocess.run(["ls", "/proc/driver/nvidia"], capture_output=True)
    if probed.returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")
    message = refused(capsys, "train", run_file(tmp_path), "--backend", "cuda")
    assert "/proc/driver/nvidia" in message, "it says what was looked for"


def test_no_gaudi_card(tmp_path: Path) -> None:
    """Refused before anything heavy is imported; what needs no card still works."""
    if Path("/sys/module/habanalabs").exists():
        pytest.skip("this machine has Gaudi's driver")
    path, every_import = run_file(tmp_path), {"PYTHONPROFILEIMPORTTIME": "1"}
    refusal = anygauge(["train", path, "--backend", "hpu"], environment=every_import)
    assert refusal.returncode != 0 and "Traceback" not in refusal.stderr
    for looked_for in ("vendor 0x1da3", "/sys/module/habanalabs", "habana-torch-plugin"):
        assert looked_for in refusal.stderr
    imported = {line.rpartition("|")[2].strip() for line in refusal.stderr.splitlines()}
    assert "anygauge_hpu.probe" in imported and "torch" not in imported
    assert not (tmp_path / "out").exists()
    shown = anygauge(["train", path, "--backend", "hpu", "--dry-run"])
    assert shown.returncode == 0 and "PT_HPU_LAZY_MODE" in shown.stdout
    variables = anygauge(["env", "--backend", "hpu", "--devices", "8", "--format", "json"])
    assert variables.returncode == 0 and "PT_HPU_LAZY_MODE" in variables.stdout


def test_unknown_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"stesp": 3})
    message = refused(capsys, "train", path)
    assert re.search(r"tiny\.yaml:\d+: train\.stesp: .*did you mean 'steps'", message)


def test_unknown_strategy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, "train", run_file(tmp_path, strategy={"name": "zreo"}))
    assert "did you mean 'zero'" in message


def test_batch_that_cannot_be_divided(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, "train", run_file(tmp_path), "--devices", "3")
    assert "train.global_batch_size 4" in message and "6" in message


def test_several_ranks_for_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "single"})
    message = refused(capsys, "train", path, "--devices", "2")
    assert "--devices 1" in message and "zero" in message


def test_misspelt_command_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err
    assert command([]) == 2


@pytest.mark.parametrize("arguments", [["train"], ["train", "a", "b"], ["train", "--nope", "a"]])
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "targets that match nothing": (
        {"adapter": {"targets": ["q_porj"]}},
        "did you mean 'q_proj'",
    ),
    "a loss that is not a number": (
        {"train": {"optimizer": {"lr": 1.0e6}, "max_grad_norm": 0.0, "steps": 8}},
        r"rows\.jsonl:\d+",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_errors_that_only_a_rank_can_find(case: str, tmp_path: Path) -> None:
    changes, expected = CHANGES[case]
    path = run_file(tmp_path, strategy={"name": "single"}, **changes)
    with pytest.raises(AnygaugeError, match=expected):
        trained_here(path)
    assert not (tmp_path / "out" / "tiny" / "adapter").exists()


def test_an_error_of_two_ranks_is_one_message(tmp_path: Path) -> None:
    changes, expected = CHANGES["a loss that is not a number"]
    run = train(run_file(tmp_path, **changes), "--devices", "2", timeout_s=PATIENCE_S)
    assert run.status == 1
    assert len(re.findall("(?:the loss|norm) became", run.err)) == 1, run.err
    assert re.search(expected, run.err)
    assert "Traceback" not in run.out + run.err
    assert not (run.folder / "adapter").exists()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": 100_000})
    process = subprocess.Popen(
        [sys.executable, "-m", "anygauge.cli", "train", str(path), "--devices", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    ranks = workers_of(tmp_path)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "rank 1" in err and "signal 9" in err and "Traceback" not in err
    deadline = time.monotonic() + PATIENCE_S
    while workers_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(tmp_path) == {}, "no rank is left"


def workers_of(folder: Path) -> dict[int, int]:
    """Rank -> process id of the workers whose job lies under `folder`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            argv = (entry / "cmdline").read_text().split("\0")
            log = (entry / "fd" / "1").readlink()
        except OSError:
            continue
        if "anygauge.training.worker" in argv and log.is_relative_to(folder):
            found[int(log.stem.removeprefix("rank"))] = int(entry.name)
    return found
