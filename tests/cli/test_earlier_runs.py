"""Runs that version 0.1 made are used as they are: trained again, resumed, asked, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from anygauge.config.load import load_run_file
from anygauge.training.checkpoints.identity import (
    changed_settings,
    settings_of,
    usual_settings,
)
from anygauge.training.checkpoints.sound import read_record
from tests.helpers.earlier import LOSSES_OF_5_AND_6, run_of_0_1
from tests.helpers.runs import anygauge, trained_here

WRITTEN_WITH_5 = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="transformers 5 wrote its tokenizer, and the digest of its configuration",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of_0_1(tmp_path)


def test_every_value_of_its_run_file_is_kept(run: Path) -> None:
    found = load_run_file(run / "run.yaml").run
    assert found.adapter is not None
    assert (found.adapter.r, found.adapter.groups[0].r) == (4, 2)
    assert found.data.train_sources[0].format == "prompt_completion"
    assert found.data.group_by_length
    assert (found.train.global_batch_size, found.train.micro_batch_size) == (4, 2)
    assert found.train.max_grad_norm == 0.5
    assert found.train.optimizer.loraplus_lr_ratio == 4
    assert (found.precision.param_dtype, found.precision.reduce_dtype) == ("float32", "param_dtype")


def test_its_run_file_asks_for_the_run_that_is_done(run: Path) -> None:
    done = anygauge(["train", run / "run.yaml", "--resume", "auto"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"finished: this run has already finished after 4 steps; result: {run / 'adapter'}\n"
    )


@WRITTEN_WITH_5
def test_it_resumes_from_its_checkpoint(run: Path) -> None:
    longer = run.parent.parent / "longer.yaml"
    longer.write_text("extends: out/run/run.yaml\ntrain: {steps: 6}\ncheckpoint: {resume: auto}\n")
    resumed = trained_here(longer)
    assert resumed.folder == run
    assert resumed.steps("step") == [1, 2, 3, 4, 5, 6]
    assert resumed.steps("loss")[4:] == pytest.approx(LOSSES_OF_5_AND_6, rel=1e-5)


def test_only_what_changed_is_said_to_have_changed(run: Path) -> None:
    kept = read_record(run / "checkpoints/step-00000004")["settings"]
    file = load_run_file(run / "run.yaml", ["train.steps=6"]).run
    changed = changed_settings(kept, settings_of(file), usual_settings(file))
    assert changed == ["train.steps: 4 -> 6"]


@WRITTEN_WITH_5
def test_its_adapter_answers(run: Path) -> None:
    asked = ["generate", run, "--prompt", "What is 2 + 2?", "--max-new-tokens", "4"]
    done = anygauge(asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or "empty" in done.stderr


@WRITTEN_WITH_5
def test_its_adapter_is_merged(run: Path) -> None:
    merged = run.parent / "merged"
    done = anygauge(["merge", run, "--output", merged])
    assert done.returncode == 0, done.stderr
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"
