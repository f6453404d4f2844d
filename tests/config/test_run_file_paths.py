"""What paths are relative to, what is expanded in them, and whether they exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config.load import check_paths, load_run_file
from anygauge.interface import RunFileError

DATA = "data: {train: {path: rows.jsonl}}\n"


def test_paths_are_relative_to_the_file_that_they_are_written_in(folder):
    folder.write(
        "bases/base.yaml",
        """\
        model: {name: ../models/small, tokenizer: ./tok.json}
        data: {train: {path: rows.jsonl}, eval: {path: sub/../eval.jsonl}}
        output: results
        """,
    )
    here = folder.path
    run = folder.load("extends: bases/base.yaml\ndata: {eval: {path: mine.jsonl}}")
    assert run.data.train.path == str(here / "bases/rows.jsonl")
    assert run.data.eval.path == str(here / "mine.jsonl")
    assert run.model.name == str(here / "models/small")
    assert run.model.tokenizer == str(here / "bases/tok.json")
    assert run.output == str(here / "results")


def test_paths_of_the_command_line_and_output_are_relative_to_the_current_directory(
    folder, monkeypatch, minimal
):
    folder.write("configs/run.yaml", minimal)
    elsewhere = folder.path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    overrides = ["data.train.path=a.jsonl", "model.name=./m"]
    run = load_run_file("../configs/run.yaml", overrides, environ={})
    assert run.data.train.path == str(elsewhere / "a.jsonl")
    assert run.model.name == str(elsewhere / "m")
    assert run.output == str(elsewhere / "runs")
    assert load_run_file(folder.path / "configs/run.yaml").data.train.path == str(
        folder.path / "configs/rows.jsonl"
    )


def test_home_and_variables_are_expanded(folder, minimal):
    text = "model: {name: ~/m, tokenizer: $MODELS}\noutput: a$$b/$A${B}\ndata: {train: {path: "
    run = folder.load(
        text + "'${DATA}/x.jsonl'}}", HOME="/home/me", MODELS="/m", DATA="/d", A="1", B="2"
    )
    assert (run.model.name, run.model.tokenizer) == ("/home/me/m", "/m")
    assert run.data.train.path == "/d/x.jsonl"
    assert run.output == str(folder.path / "a$b/12")


def test_a_dollar_sign_elsewhere_is_left_alone(folder, minimal):
    run = folder.load(minimal + "environment: {A: $B}\noutput: 'a$/b'")
    assert run.environment == {"A": "$B"}
    assert run.output == str(folder.path / "a$/b")


def test_a_model_is_a_folder_if_there_is_one_and_else_a_name_on_the_hub(folder):
    (folder.path / "org/local").mkdir(parents=True)
    for written, meant in {
        "org/remote": "org/remote",
        "plain": "plain",
        "org/local": str(folder.path / "org/local"),
        "./org/remote": str(folder.path / "org/remote"),
        "/abs/model": "/abs/model",
    }.items():
        run = folder.load(f"model: {{name: {written}, tokenizer: {written}}}\n{DATA}")
        assert (run.model.name, run.model.tokenizer) == (meant, meant)
    run = folder.load(f"model: {{name: a/b, tokenizer: tok.json}}\n{DATA}")
    assert run.model.tokenizer == str(folder.path / "tok.json")


def test_dots_behind_a_link_to_elsewhere_are_kept(folder, minimal):
    (folder.path / "real/deep").mkdir(parents=True)
    (folder.path / "link").symlink_to("real/deep")
    folder.write("real/rows.jsonl", "{}")
    loaded = folder.load(minimal, "data.train.path=link/../rows.jsonl")
    assert Path(loaded.data.train.path).samefile(folder.path / "real/rows.jsonl")
    check_paths(loaded)


def test_check_paths_passes_what_is_there(folder):
    folder.write("rows.jsonl", "{}")
    folder.write("tok.json", "{}")
    (folder.path / "m").mkdir()
    check_paths(folder.load(f"model: {{name: m, tokenizer: tok.json}}\n{DATA}"))
    check_paths(folder.load(f"model: {{name: org/name}}\n{DATA}"))


def test_check_paths_names_every_file_that_is_missing(folder):
    folder.write("bases/base.yaml", "data:\n  train:\n    path: row.jsonl\n")
    folder.write("bases/rows.jsonl", "{}")
    folder.write("file", "{}")
    (folder.path / "dir").mkdir()
    loaded = folder.load(
        "extends: bases/base.yaml\nmodel:\n  name: ./nowhere/m\n  tokenizer: ./t\n",
        "data.eval.path=dir",
    )
    with pytest.raises(RunFileError) as caught:
        check_paths(loaded)
    here = folder.path
    assert str(caught.value).split("\n") == [
        "run.yaml: 4 problems",
        f"  run.yaml:3: model.name: no such folder: {here}/nowhere/m "
        f"(nor is there a folder {here}/nowhere)",
        f"  run.yaml:4: model.tokenizer: no such file or folder: {here}/t",
        f"  bases/base.yaml:3: data.train.path: no such file: {here}/bases/row.jsonl; "
        "did you mean 'rows.jsonl'?",
        f"  --set data.eval.path=dir: data.eval.path: is a folder, expected a file: {here}/dir",
    ]
    with pytest.raises(RunFileError, match=r"model\.name: is a file, expected a folder: /.*/file"):
        check_paths(folder.load(f"model: {{name: file}}\n{DATA}", "data.train.path=file"))
