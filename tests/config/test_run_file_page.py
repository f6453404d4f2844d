"""The page about run files: its examples do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import RunFileError

PAGE = Path(__file__).parents[2] / "docs/run-file.md"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert found, f"the page has no block of {language}"
    return found


@pytest.fixture
def examples(folder):
    for block in blocks("yaml"):
        first = block.split("\n", 1)[0]
        folder.write(first.removeprefix("# file: "), block)
    return folder


def test_the_examples_load(examples):
    assert load_run_file("minimal.yaml", environ={}) == RunFile.model_validate(
        {
            "model": {"name": "Qwen/Qwen2.5-0.5B"},
            "data": {"train": {"path": str(examples.path / "data/train.jsonl")}},
            "output": str(examples.path / "runs"),
        }
    )
    run = load_run_file("wide.yaml", environ={"DATA": "/d"})
    assert (run.name, run.adapter.r, len(run.adapter.targets)) == ("wide", 64, 4)
    assert (run.train.steps, run.train.epochs, run.train.optimizer.lr) == (None, 3, 2e-4)


def test_the_command_lines_of_the_page_are_sound(examples):
    runs = []
    for line in "".join(blocks("sh")).splitlines():
        program, _, file, *rest = shlex.split(line)
        assert (program, set(rest[::2])) == ("anygauge", {"--set"})
        runs.append(load_run_file(file, rest[1::2], environ={"DATA": "/d"}))
    first, second = runs
    assert (first.train.steps, first.adapter) == (10, None)
    assert (second.adapter.targets, second.train.optimizer.lr) == (["q_proj", "v_proj"], 1e-5)


def test_the_complaint_of_the_page_is_what_is_said(examples):
    with pytest.raises(RunFileError) as caught:
        load_run_file("wrong.yaml", environ={"DATA": "/d"})
    assert f"{caught.value}\n" == blocks("text")[0]
