"""The page about run files: its tables are today's, its examples do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from anygauge.config.describe import sections
from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import RunFileError
from docs.run_file_tables import BEGIN, END, field_rows, reference_markdown, update

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


def test_the_tables_are_those_of_the_schema():
    text = PAGE.read_text("utf-8")
    assert text == update(text), f"run: python docs/run_file_tables.py {PAGE}"


def test_update_replaces_what_is_between_the_marks_alone():
    assert update(f"a\n{BEGIN}\nold\n{END}\nb\n") == (
        f"a\n{BEGIN}\n\n{reference_markdown()}\n{END}\nb\n"
    )
    with pytest.raises(ValueError, match="needs the lines"):
        update("no marks")


def test_every_field_of_every_section_has_a_full_row():
    text = reference_markdown()
    for _, section in sections():
        rows = field_rows(section)
        assert "\n".join(rows) in text
        assert [row.split("`")[1] for row in rows] == list(section.model_fields)
        for row in rows:
            cells = re.split(r"(?<!\\)\|", row)
            assert len(cells) == 6 and all(cell.strip() for cell in cells[1:5]), row


def test_rows_say_type_default_and_meaning():
    text = reference_markdown()
    assert "| `lr` | number > 0 | `0.0002` | Peak learning rate. |" in text
    assert "| `path` | text | required | A .json, .jsonl, .csv, .parquet or .txt file, the" in text
    assert '| `template` | text | `"{prompt}\\n"` |' in text
    assert "| `adapter` | section or null | `null` | A low-rank adapter (LoRA)." in text
    assert "each run makes \\<output>/\\<name>. |" in text


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
