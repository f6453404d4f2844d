"""`data.chat_template`: a name, a template or a path; and the variables that it gets."""

from __future__ import annotations

import inspect

import pytest

from anygauge.config.load import check_folders, check_paths, load_run_file
from anygauge.config.paths import NAMED_TEMPLATES
from anygauge.config.resolved import dump_run, parse_run, run_json
from anygauge.config.schema import DataSection, SourceSection
from anygauge.interface import RunFileError

SOURCE = SourceSection(path="rows.jsonl")


def text(**fields: str) -> str:
    data = "".join(f", {name}: {value}" for name, value in fields.items())
    return f"model: {{name: some/model}}\ndata: {{train: {{path: rows.jsonl}}{data}}}\n"


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_name_is_no_path(folder, name):
    folder.write("rows.jsonl", "{}\n")
    folder.write(name, "another template")
    loaded = folder.load(text(chat_template=name))
    assert loaded.data.chat_template == name
    check_paths(loaded)
    folder.write("again/run.yaml", dump_run(loaded))
    again = load_run_file(folder.path / "again/run.yaml", environ={})
    assert again.data.chat_template == name
    check_folders(loaded, [str(folder.path)], "")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("./phi", "{here}/phi"),
        ("phi.jinja", "{here}/phi.jinja"),
        ("Phi", "{here}/Phi"),
        ("'{{ x }}'", "{{ x }}"),
        ("'{% if x %}{% endif %}'", "{% if x %}{% endif %}"),
        ('"two\\nlines"', "{here}/two\nlines"),
    ],
)
def test_what_is_a_path(folder, written, meant):
    here = str(folder.path)
    loaded = folder.load(text(chat_template=written))
    assert loaded.data.chat_template == meant.replace("{here}", here)


def test_a_misspelt_name_is_told_the_nearest(folder):
    folder.write("rows.jsonl", "{}\n")
    folder.write("chatmll", "")
    with pytest.raises(RunFileError) as caught:
        check_paths(folder.load(text(chat_template="chatlm")))
    where = f"{folder.path}/chatlm"
    said = f"data.chat_template: no such file: {where}; did you mean 'chatml'?"
    assert str(caught.value).endswith(said)


def test_variables_are_kept_as_they_are(folder):
    run = folder.load(
        text(chat_template_kwargs="{enable_thinking: false, depth: 2, gone: null}"),
        "data.chat_template_kwargs.sign=x",
    )
    expected = {"enable_thinking": False, "depth": 2, "sign": "x"}
    assert run.data.chat_template_kwargs == expected
    assert parse_run(run_json(run)) == run


def test_every_argument_of_the_library_is_refused():
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    functions = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    names = {name for each in functions for name in inspect.signature(each).parameters}
    for name in {*names, "messages"} - {"self", "kwargs"}:
        with pytest.raises(ValueError, match=f"'{name}': anygauge sets this itself"):
            DataSection(train=SOURCE, chat_template_kwargs={name: 1})
