"""What paths are relative to, what is expanded in them, what is none, and whether they exist."""

from __future__ import annotations

import inspect
from operator import attrgetter
from pathlib import Path

import pytest

from anygauge.config.load import check_folders, check_paths, load_run_file
from anygauge.config.paths import NAMED_TEMPLATES
from anygauge.config.resolved import dump_run, parse_run, run_json
from anygauge.config.schema import DataSection, SourceSection
from anygauge.interface import RunFileError

LIST = """\
model: {name: some/model}
data:
  train:
    - {path: a.jsonl, weight: 2, limit: null}
    - path: owner/name
      split: null
  eval: {path: $D/b.csv}
  cache: kept
  chat_template: t.jinja
"""


def complaints(run) -> list[str]:
    with pytest.raises(RunFileError) as caught:
        check_paths(run)
    return [line.strip() for line in str(caught.value).split("\n")]


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
    rows = load_run_file(folder.path / "configs/run.yaml").data.train.path
    assert rows == str(folder.path / "configs/rows.jsonl")


def test_home_and_variables_are_expanded_in_paths_alone(folder):
    text = "model: {name: ~/m, tokenizer: $MODELS}\noutput: a$$b/$A${B}$\ndata: {train: {path: "
    text += "'${DATA}/x.jsonl'}}\nenvironment: {A: $B}"
    run = folder.load(text, HOME="/home/me", MODELS="/m", DATA="/d", A="1", B="2")
    assert (run.model.name, run.model.tokenizer) == ("/home/me/m", "/m")
    assert run.data.train.path == "/d/x.jsonl"
    assert run.output == str(folder.path / "a$b/12$")
    assert run.environment == {"A": "$B"}


@pytest.mark.parametrize(
    ("field", "written", "meant"),
    [
        ("model.name", "org/remote", "org/remote"),
        ("model.name", "plain", "plain"),
        ("model.name", "org/local", "{here}/org/local"),
        ("model.name", "./org/remote", "{here}/org/remote"),
        ("model.name", "/abs/model", "/abs/model"),
        ("model.tokenizer", "org/remote", "org/remote"),
        ("model.tokenizer", "org/local", "{here}/org/local"),
        ("model.tokenizer", "tok.json", "{here}/tok.json"),
        ("data.train.path", "owner/name", "owner/name"),
        ("data.train.path", "plain", "plain"),
        ("data.train.path", "rows", "{here}/rows"),
        ("data.train.path", "./owner/name", "{here}/owner/name"),
        ("data.train.path", "owner/rows.csv", "{here}/owner/rows.csv"),
        ("data.train.path", "a/b/c", "{here}/a/b/c"),
        ("data.train.path", "'https://host/a/../b.jsonl?x=1'", "https://host/a/../b.jsonl?x=1"),
        ("data.train.path", "s3://bucket/rows.csv", "s3://bucket/rows.csv"),
        ("data.cache", "off", "off"),
        ("data.cache", "'off'", "off"),
        ("data.cache", "false", "off"),
        ("data.chat_template", "./phi", "{here}/phi"),
        ("data.chat_template", "phi.jinja", "{here}/phi.jinja"),
        ("data.chat_template", "Phi", "{here}/Phi"),
        ("data.chat_template", "'{{ x }} $y'", "{{ x }} $y"),
        ("data.chat_template", "'{% if x %}{% endif %}'", "{% if x %}{% endif %}"),
        ("data.chat_template", '"two\\nlines"', "{here}/two\nlines"),
    ],
)
def test_what_is_a_path_and_what_a_name(folder, minimal, field, written, meant):
    (folder.path / "org/local").mkdir(parents=True)
    folder.write("rows", "")
    found = attrgetter(field)(folder.load(minimal, f"{field}={written}"))
    assert found == meant.replace("{here}", str(folder.path))


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_templates_name_is_no_path(folder, minimal, name):
    folder.write("rows.jsonl", "{}\n")
    folder.write(name, "another template")
    run = folder.load(minimal, f"data.chat_template={name}")
    assert run.data.chat_template == name
    check_paths(run)
    folder.write("again/run.yaml", dump_run(run))
    again = load_run_file(folder.path / "again/run.yaml", environ={})
    assert again.data.chat_template == name
    check_folders(run, [str(folder.path)], "")


def test_dots_behind_a_link_to_elsewhere_are_kept(folder, minimal):
    (folder.path / "real/deep").mkdir(parents=True)
    (folder.path / "link").symlink_to("real/deep")
    folder.write("real/rows.jsonl", "{}")
    run = folder.load(minimal, "data.train.path=link/../rows.jsonl")
    assert Path(run.data.train.path).samefile(folder.path / "real/rows.jsonl")
    check_paths(run)


def test_check_paths_passes_what_is_there(folder, minimal):
    folder.write("rows.jsonl", "{}")
    folder.write("tok.json", "{}")
    (folder.path / "m").mkdir()
    check_paths(folder.load(minimal, "model={name: m, tokenizer: tok.json}"))
    check_paths(folder.load(minimal))


def test_check_paths_names_every_file_that_is_missing(folder, minimal):
    folder.write("bases/base.yaml", "data:\n  train:\n    path: row.jsonl\n")
    folder.write("bases/rows.jsonl", "{}")
    folder.write("file", "{}")
    (folder.path / "dir").mkdir()
    text = "extends: bases/base.yaml\nmodel:\n  name: ./nowhere/m\n  tokenizer: ./t\n"
    here = folder.path
    assert complaints(folder.load(text, "data.eval.path=dir")) == [
        "run.yaml: 4 problems",
        f"run.yaml:3: model.name: no such folder: {here}/nowhere/m "
        f"(nor is there a folder {here}/nowhere)",
        f"run.yaml:4: model.tokenizer: no such file or folder: {here}/t",
        f"bases/base.yaml:3: data.train.path: no such file: {here}/bases/row.jsonl; "
        "did you mean 'rows.jsonl'?",
        f"--set data.eval.path=dir: data.eval.path: is a folder, expected a file: {here}/dir",
    ]
    run = folder.load(minimal, "data.train.path=file", "model.name=./file")
    assert complaints(run)[1:] == [
        f"--set model.name=./file: model.name: is a file, expected a folder: {here}/file"
    ]
    run = folder.load(minimal, "data.train.path=file", "data.chat_template=chatlm")
    assert complaints(run)[1].endswith(f": no such file: {here}/chatlm; did you mean 'chatml'?")


def test_a_list_of_sources_and_each_missing_file_of_it_with_its_line(folder):
    here = str(folder.path)
    folder.write("deep/b.csv", "a\n")
    run = folder.load(LIST, D="deep")
    data = run.data
    assert [source.path for source in data.train_sources] == [f"{here}/a.jsonl", "owner/name"]
    assert [source.weight for source in data.train_sources] == [2.0, 1.0]
    assert data.train_sources[1].split == "train"
    assert data.eval_sources[0].path == f"{here}/deep/b.csv"
    assert (data.cache, data.chat_template) == (f"{here}/kept", f"{here}/t.jinja")
    assert complaints(run) == [
        "run.yaml: 2 problems",
        f"run.yaml:4: data.train[0].path: no such file: {here}/a.jsonl",
        f"run.yaml:9: data.chat_template: no such file: {here}/t.jinja",
    ]


def test_variables_of_a_template_are_kept_as_they_are(folder, minimal):
    given = "data.chat_template_kwargs={enable_thinking: false, depth: 2, gone: null}"
    run = folder.load(minimal, given, "data.chat_template_kwargs.sign=x")
    expected = {"enable_thinking": False, "depth": 2, "sign": "x"}
    assert run.data.chat_template_kwargs == expected
    assert parse_run(run_json(run)) == run


def test_every_argument_of_the_library_is_refused():
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    source = SourceSection(path="rows.jsonl")
    functions = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    names = {name for each in functions for name in inspect.signature(each).parameters}
    for name in {*names, "messages"} - {"self", "kwargs"}:
        with pytest.raises(ValueError, match=f"'{name}': anygauge sets this itself"):
            DataSection(train=source, chat_template_kwargs={name: 1})
