"""Run files that are not meant well, or not meant so: each is refused at once, with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.interface import RunFileError

MAPPINGS = "backend_options:\n  a0: &a0 {x: 1}\n" + "".join(
    f"  a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(10))}}}\n" for n in range(1, 12)
)


MERGES = "backend_options:\n  a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"  a{n}: &a{n}\n    <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n    k{n}: *a{n - 1}\n"
    for n in range(1, 14)
)


@pytest.mark.parametrize("text", [MAPPINGS, MERGES], ids=["mappings", "merges"])
def test_an_alias_bomb_is_refused_with_its_line(folder, minimal, text):
    (line,) = folder.refuse(minimal + text)
    place, _, said = line.partition(": not valid YAML: ")
    assert place.startswith("run.yaml:") and int(place.partition(":")[2]) >= 3
    assert said.startswith("more than 20,000 values, counting each again wherever an alias")


def test_aliases_are_of_use_all_the_same(folder, minimal):
    text = "strategy: {name: zero, options: &o {a: [1, 2]}}\nbackend_options: {b: *o, c: *o}"
    run = folder.load(minimal + text).run
    assert run.backend_options == {"b": {"a": [1, 2]}, "c": {"a": [1, 2]}}


def test_a_value_of_an_option_has_the_same_bounds(folder, minimal):
    (many,) = folder.refuse(minimal, f"backend_options.a=[{'1,' * 20_001}]")
    assert "backend_options.a: the value is not valid YAML: more than 20,000 values" in many
    (deep,) = folder.refuse(minimal, f"backend_options.a={'[' * 200}")
    assert deep.endswith("mappings and lists are nested more than 100 deep")
    (path,) = folder.refuse(minimal, f"{'a.' * 5000}b=1")
    assert "a path of 5001 names; at most 100" in path


def test_thousands_of_complaints_are_cut(folder, minimal):
    with pytest.raises(RunFileError) as caught:
        folder.load(minimal + "train:\n" + "".join(f"  k{n}: {n}\n" for n in range(3000)))
    header, *lines = str(caught.value).split("\n")
    assert header == "run.yaml: more than 50 problems, first"
    assert len(lines) == 50
    assert "train.k0: no such field" in lines[0]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_is_none_is_refused_at_once(folder, kind):
    path = folder.path / "run.yaml"
    if kind == "pipe":
        os.mkfifo(path)
        said = "run.yaml: cannot be read: it is a named pipe, not a regular file"
    else:
        path = Path("/dev/zero")
        said = "/dev/zero: cannot be read: it is a device or socket, not a regular file"
    with pytest.raises(RunFileError) as caught:
        load_run_file(path if kind == "device" else "run.yaml", environ={})
    assert str(caught.value) == said


def test_a_very_long_file_is_refused(folder, minimal):
    folder.write("run.yaml", minimal + "# " + "x" * 2**20)
    with pytest.raises(RunFileError, match=r"^run.yaml: cannot be read: it is longer than 1 MiB$"):
        load_run_file("run.yaml", environ={})


def test_files_that_extend_each_other_many_times_are_refused(folder, minimal):
    for number in range(20):
        folder.write(f"f{number}.yaml", f"extends: [f{number + 1}.yaml, f{number + 1}.yaml]\n")
    folder.write("f20.yaml", minimal)
    (line,) = folder.refuse("extends: f0.yaml")
    assert "this run reads more than 100 files through 'extends'" in line


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('environment: {"A\\0": x}', "environment.A\0: 'A\\x00' cannot be the name of a variable"),
        (
            f"environment: {{A: {'x' * 100_000}}}",
            "environment.A: name and value together have",
        ),
        (f"train: {{seed: 0x{'f' * 5000}}}", "train.seed: 0xfff"),
    ],
    ids=["NUL", "long", "large"],
)
def test_values_that_no_page_could_show(folder, minimal, text, complaint):
    """The others: `messages.txt`."""
    (line,) = folder.refuse(minimal + text)
    assert line.startswith(f"run.yaml:3: {complaint}")


SIZES = (
    "data: {train: {path: rows.jsonl}}\nmodel:\n  tokenizer: t\n  config:\n    model_type: llama\n"
)


@pytest.mark.parametrize(
    ("field", "value", "received"),
    [
        ("hidden_size", "-4", "-4 (int)"),
        ("hidden_size", "many", "'many' (str)"),
        ("hidden_size", "1.5", "1.5 (float)"),
        ("hidden_size", "true", "true (bool)"),
        ("hidden_size", "[8]", "a list of 1"),
        ("num_hidden_layers", "0", "0 (int)"),
        ("num_hidden_layers", "[2]", "a list of 1"),
        ("vocab_size", "99999999999", "99999999999 (int)"),
    ],
)
def test_sizes_that_no_model_has(folder, field, value, received):
    (line,) = folder.refuse(f"{SIZES}    {field}: {value}\n")
    most = 1000 if field == "num_hidden_layers" else 2**31 - 1
    said = f"got {received}, expected a whole number from 1 to {most}"
    assert line == f"run.yaml:6: model.config.{field}: {said}"


@pytest.mark.parametrize("field", ["intermediate_size", "num_key_value_heads"])
def test_some_sizes_are_counted_by_layer(folder, field):
    folder.load(f"{SIZES}    {field}: [2, 4]\n")
    (line,) = folder.refuse(f"{SIZES}    {field}: [2, -4]\n")
    assert line.startswith(f"run.yaml:6: model.config.{field}[1]: got -4 (int), expected a whole")
    for value, received in (("[]", "a list of 0"), ("many", "'many' (str)")):
        (line,) = folder.refuse(f"{SIZES}    {field}: {value}\n")
        said = f"got {received}, expected a whole number from 1 to {2**31 - 1}, or a list of them"
        assert line.startswith(f"run.yaml:6: model.config.{field}: {said}")


def test_a_model_may_have_no_experts(folder):
    folder.load(f"{SIZES}    num_local_experts: 0\n")
    (line,) = folder.refuse(f"{SIZES}    num_local_experts: -1\n")
    assert line.endswith("got -1 (int), expected a whole number from 0 to 2147483647")


def test_sizes_may_be_null_and_stand_in_a_part(folder):
    folder.load(f"{SIZES}    num_key_value_heads: null\n    hidden_size: 64\n")
    (line,) = folder.refuse(f"{SIZES}    text_config: {{num_hidden_layers: 1000000}}\n")
    assert line.startswith("run.yaml:6: model.config.text_config.num_hidden_layers: got 1000000")
