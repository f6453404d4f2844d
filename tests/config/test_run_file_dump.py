"""A run that was written out, for people and for ranks, is the same run when it is read again."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anygauge.config.load import load_run_file
from anygauge.config.resolved import dump_run, parse_run, read_run, run_json
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError

SHARED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# Lone surrogates cannot be stored in a file.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TRICKY = st.sampled_from(
    [
        *("1e5", "2e-4", "010", "12:30:00", "2024-01-31", "0x1F", ".inf", "1_000", "yes", "off"),
        *("null", "~", "#", "a:b", "-", "=", "<<", "$HOME", "", "a #b", "a: b", "- a", " a ", "\t"),
        *("a\n\nb\n", "\x85", "\u2028", "\ufeff", "é", "x " * 99),
    ]
)
WORDS = TEXT | TRICKY
NUMBERS = st.floats(min_value=1e-300, max_value=1e6)
SHARES = st.floats(min_value=0, max_value=1)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | WORDS
WHOLE = WORDS.filter(lambda text: "\0" not in text)
VARIABLES = WHOLE.filter(lambda text: text and "=" not in text)
FREE = st.dictionaries(
    WORDS,
    st.recursive(
        SCALARS,
        lambda below: st.lists(below, max_size=2) | st.dictionaries(WORDS, below, max_size=2),
        max_leaves=4,
    ),
    max_size=2,
)
PATHS = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), max_size=8)
    | st.sampled_from(["$HOME", "~", "${A}", "$$", "1e5"]),
    min_size=1,
    max_size=3,
).map(lambda parts: "/" + "/".join(f"x{part}" for part in parts))

SOURCES = st.fixed_dictionaries({"path": PATHS | st.just("owner/name"), "template": WORDS})

RUNS = st.builds(
    lambda **sections: RunFile.model_validate(sections, strict=True),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    output=PATHS,
    backend=WORDS,
    model=st.fixed_dictionaries(
        {"name": PATHS | st.just("org/name-1e5"), "revision": st.none() | WORDS}
    )
    | st.fixed_dictionaries(
        {"config": FREE.map(lambda free: free | {"model_type": "llama"}), "tokenizer": PATHS}
    ),
    adapter=st.none()
    | st.fixed_dictionaries(
        {"alpha": NUMBERS, "targets": WORDS.map(re.escape) | st.lists(WORDS, max_size=3)}
    ),
    data=st.fixed_dictionaries(
        {
            "train": SOURCES | st.lists(SOURCES, min_size=1, max_size=3),
            "chat_template": st.none() | PATHS | st.just("{{ x }} $y"),
            "cache": st.none() | PATHS | st.just("off"),
            "eval": st.none() | st.fixed_dictionaries({"path": PATHS}),
            "packing": st.booleans(),
        }
    ),
    train=st.fixed_dictionaries(
        {
            "steps": st.none() | st.integers(1, 2**31 - 1),
            "optimizer": st.fixed_dictionaries({"lr": NUMBERS, "betas": st.tuples(SHARES, SHARES)}),
        }
    ),
    launch=st.fixed_dictionaries({"options": FREE}),
    environment=st.dictionaries(VARIABLES, WHOLE, max_size=3),
    trackers=st.lists(WORDS, max_size=3),
)


@SHARED
@given(run=RUNS)
def test_what_is_written_is_read_as_an_equal_run(folder, run):
    """By a user, from anywhere; by a rank; and alike by plain YAML."""
    text = dump_run(run)
    target = folder.path / "again.yaml"
    target.write_text(text, "utf-8")
    again = load_run_file(target, environ={}, cwd=Path("/somewhere/else"))
    assert again == run
    assert dump_run(again) == text
    assert parse_run(run_json(run)) == run
    assert run_json(parse_run(run_json(run))) == run_json(run)
    read = yaml.safe_load(text)
    assert read["trackers"] == run.trackers
    assert read["environment"] == run.environment
    assert read["train"]["optimizer"]["lr"] == run.train.optimizer.lr


def test_a_dump_is_a_commented_file_with_every_field_and_absolute_paths(folder, minimal):
    (folder.path / "m").mkdir()
    text = dump_run(folder.load("model: {name: m}\ndata: {train: {path: $D/x.jsonl}}", D="d"))
    assert text.startswith("# A resolved run file (format 2): every field with its value")
    read = yaml.safe_load(text)
    assert list(read) == list(RunFile.model_fields)
    assert read["model"]["name"] == str(folder.path / "m")
    assert read["data"]["train"]["path"] == str(folder.path / "d/x.jsonl")
    assert read["output"] == str(folder.path / "runs")
    assert read["train"]["optimizer"]["betas"] == [0.9, 0.999]


def test_a_run_made_by_hand_is_dumped_relative_to_the_current_directory(folder):
    run = RunFile.model_validate(
        {"model": {"name": "org/m"}, "data": {"train": {"path": "a$b.jsonl"}}, "output": "~"}
    )
    target = folder.write("deep/run.yaml", dump_run(run))
    again = load_run_file(target, environ={})
    assert again.model.name == "org/m"
    assert again.data.train.path == str(folder.path / "a$b.jsonl")
    assert again.output == str(folder.path / "~")


def test_equal_values_are_written_out_and_not_as_aliases(folder, minimal):
    text = minimal + "strategy: {name: zero, options: {a: &x [1, 2], b: *x}}"
    dumped = dump_run(folder.load(text))
    assert "&" not in dumped
    assert yaml.safe_load(dumped)["strategy"]["options"] == {"a": [1, 2], "b": [1, 2]}


def test_a_number_without_an_end_stays_one(folder, minimal):
    run = folder.load(minimal + "launch: {options: {a: .inf, b: [-.inf, .nan]}}")
    again = parse_run(run_json(run)).launch.options
    assert again["a"] == math.inf and again["b"][0] == -math.inf and math.isnan(again["b"][1])


def test_fields_that_an_adapter_decides_are_left_to_it(folder, minimal):
    (folder.path / "a").mkdir()
    run = folder.load(minimal + "adapter: {start_from: a, alpha: 32}")
    again = parse_run(run_json(run)).adapter
    assert again is not None and again.own_fields == {"alpha"}


def test_another_versions_run_is_refused(folder, minimal, tmp_path):
    values = json.loads(run_json(folder.load(minimal)))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**values, "train": {**values["train"], "clip": 1.0}}))
    with pytest.raises(AnygaugeError) as caught:
        read_run(path)
    assert str(caught.value).startswith(
        f"{path}: this is not a resolved run of the installed version of anygauge ('train.clip' "
    )
    assert str(caught.value).endswith("the same version?")


@pytest.mark.parametrize("text", ["", "[]", "{", "name: t\n", '{"name": 3}'])
def test_what_is_no_run_is_refused(text):
    with pytest.raises(AnygaugeError, match="this is not a resolved run of the installed version"):
        parse_run(text)


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(AnygaugeError, match=r"run\.json: .*No such file"):
        read_run(tmp_path / "run.json")
