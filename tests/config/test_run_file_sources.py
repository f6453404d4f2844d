"""Sources of data in a run file: one or a list, files or names on the hub; cache and template."""

from __future__ import annotations

import pytest

from anygauge.config.load import check_paths
from anygauge.interface import RunFileError

MODEL = "model: {name: some/model}\n"

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


def test_a_list_of_sources(folder):
    loaded = folder.load(LIST, D="deep")
    data = loaded.data
    here = str(folder.path)
    assert [source.path for source in data.train_sources] == [f"{here}/a.jsonl", "owner/name"]
    assert [source.weight for source in data.train_sources] == [2.0, 1.0]
    assert data.train_sources[1].split == "train"
    assert data.eval_sources[0].path == f"{here}/deep/b.csv"
    assert (data.cache, data.chat_template) == (f"{here}/kept", f"{here}/t.jinja")


def test_each_missing_file_of_a_list_is_named_with_its_line(folder):
    folder.write("deep/b.csv", "a\n")
    with pytest.raises(RunFileError) as caught:
        check_paths(folder.load(LIST, D="deep"))
    assert str(caught.value).split("\n") == [
        "run.yaml: 2 problems",
        f"  run.yaml:4: data.train[0].path: no such file: {folder.path}/a.jsonl",
        f"  run.yaml:9: data.chat_template: no such file: {folder.path}/t.jinja",
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("owner/name", "owner/name"),
        ("plain", "plain"),
        ("rows", "{here}/rows"),
        ("./owner/name", "{here}/owner/name"),
        ("owner/rows.csv", "{here}/owner/rows.csv"),
        ("a/b/c", "{here}/a/b/c"),
        ("https://host/a/../b.jsonl?x=1", "https://host/a/../b.jsonl?x=1"),
        ("s3://bucket/rows.csv", "s3://bucket/rows.csv"),
    ],
)
def test_what_is_a_file_and_what_a_name_on_the_hub(folder, written, meant):
    folder.write("rows", "")
    path = folder.load(f"{MODEL}data: {{train: {{path: '{written}'}}}}").data.train.path
    assert path == meant.format(here=folder.path)


@pytest.mark.parametrize("written", ["off", "'off'", "false"])
def test_the_cache_is_switched_off_by_a_bare_word(folder, written):
    loaded = folder.load(f"{MODEL}data: {{train: {{path: a.jsonl}}, cache: {written}}}")
    assert loaded.data.cache == "off"


def test_a_template_may_be_written_in_the_run_file(folder):
    text = f"{MODEL}data: {{train: {{path: a.jsonl}}, chat_template: '{{{{ x }}}} $y'}}"
    assert folder.load(text).data.chat_template == "{{ x }} $y"
