"""A run of a Python program: a dict or an object is read as its file would be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from anygauge.cli.from_python import set_options
from anygauge.config.document import NotYaml, read_yaml
from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.config.tree import Origin, plain_value
from anygauge.interface import RunFileError, UsageError
from tests.config.test_run_file_messages import BLOCKS

RUN: dict[str, Any] = {
    "model": {"name": "some/model"},
    "adapter": {"r": 4},
    "data": {"train": {"path": "rows.jsonl"}, "cache": "$HOME/cache"},
    "strategy": "fsdp",
    "train": {"steps": 3, "optimizer": {"lr": 1e-05, "betas": [0.9, 0.99]}},
}
ONLY_IN_FILES = ("adapter:", "backend: on", "extends: run.yaml")
"""A section left empty, YAML's word for true, a file that extends itself."""


def refused(*given: Any, **options: Any) -> list[str]:
    """The lines of a complaint, without header and indent."""
    with pytest.raises(RunFileError) as caught:
        load_run_file(*given, **options)
    header, *lines = str(caught.value).split("\n")
    return [line.removeprefix("  ") for line in lines] or [header]


def wrong_files() -> list[str]:
    """Texts of wrong run files that a dict can hold too."""
    found = []
    for block in BLOCKS:
        lines = block.split("\n")
        given = [line for line in lines if not line.startswith(">")]
        problems: list[Any] = []
        try:
            if not any(line.startswith("--set ") for line in given):
                read_yaml("\n".join(given), Origin("run.yaml", 1, Path()), problems)
                found += [] if problems else ["\n".join(given)]
        except NotYaml:
            pass
    return [text for text in found if text not in ONLY_IN_FILES]


def without_places(line: str) -> str:
    """A complaint without lines, and without how a number was written."""
    line = re.sub(r"run\.yaml(:\d+)?", "run", line)
    return re.sub(r"got \S+ \(float\)", "got ... (float)", line)


def test_a_wrong_dict_gets_the_messages_of_its_file(folder, minimal):
    texts = wrong_files()
    assert len(texts) > 70
    for given in texts:
        sections = {line.partition(":")[0] for line in given.splitlines()}
        base = [line for line in minimal.splitlines() if line.partition(":")[0] not in sections]
        text = "\n".join([*base, given])
        of_file = folder.refuse(text)
        values = plain_value(read_yaml(text, Origin("run.yaml", 1, folder.path), []))
        of_dict = refused(values, cwd=folder.path, environ={})
        assert sorted(map(without_places, of_dict)) == sorted(map(without_places, of_file))


def test_a_dict_an_object_and_their_file_are_one_run(folder):
    of_file = folder.load(yaml.safe_dump(RUN), HOME="/home/me")
    of_dict = load_run_file(RUN, cwd=folder.path, environ={"HOME": "/home/me"})
    assert of_file == of_dict == load_run_file(of_dict) == load_run_file(of_file)
    assert of_dict.data.train_sources[0].path == str(folder.path / "rows.jsonl")
    assert of_dict.data.cache == "/home/me/cache"
    assert of_dict.strategy.name == "fsdp"
    by_hand = load_run_file(RunFile.model_validate(RUN | {"strategy": {"name": "fsdp"}}))
    assert by_hand.train == of_file.train and by_hand.strategy == of_file.strategy


def test_a_dollar_sign_in_the_path_of_an_object_stays(folder):
    run = load_run_file({**RUN, "output": "a$$b"}, cwd=folder.path, environ={"HOME": "/h"})
    assert load_run_file(run, environ={}).output == run.output == str(folder.path / "a$b")


def test_values_of_an_object_say_where_they_were_written(folder):
    run = folder.load("model: {name: some/model}\ndata: {train: {path: a}}\ntrain: {steps: 3}\n")
    changed = load_run_file(run, ["train.seed=1"])
    assert str(changed.error("train.steps", "is odd")).splitlines() == [
        "run.yaml: 1 problem",
        "  run.yaml:3: train.steps: is odd",
    ]
    assert "--set train.seed=1: train.seed: is odd" in str(changed.error("train.seed", "is odd"))
    assert not changed.has_value("train.epochs") and changed.has_value("train.steps")


def test_what_scripts_have_is_read(folder):
    given = {
        **RUN,
        "output": Path("results"),
        "train": {"steps": np.int64(7), "optimizer": {"lr": np.float32(0.5), "betas": (0, 1)}},
    }
    run = load_run_file(given, cwd=folder.path)
    assert (run.train.steps, run.train.optimizer.lr) == (7, 0.5)
    assert run.train.optimizer.betas == (0.0, 1.0)
    assert run.output == str(folder.path / "results")


def test_a_dict_extends_files(folder):
    base = folder.write("bases/base.yaml", yaml.safe_dump(RUN))
    run = load_run_file({"extends": base, "train": {"steps": 9}}, cwd=folder.path)
    assert (run.train.steps, run.adapter and run.adapter.r) == (9, 4)
    assert refused({**RUN, "extends": "bases/bse.yaml"}, cwd=folder.path) == [
        f"run: extends: no such file: {folder.path}/bases/bse.yaml; did you mean 'base.yaml'?"
    ]


def test_overrides_are_values_and_win(folder):
    given = {"train.steps": 10, "model.revision": "1e5", "strategy": "ddp", "adapter": None}
    overrides = set_options(given)
    run = load_run_file(RUN, overrides, {"launch.devices": 2}, cwd=folder.path)
    assert (run.train.steps, run.model.revision, run.adapter) == (10, "1e5", None)
    assert (run.strategy.name, run.launch.devices) == ("ddp", 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train.stepz": 1}, "--set train.stepz=1: train.stepz: no such field; did you mean 'ste"),
        ({"train.": 1}, "--set train.=1: 'train.' is not a path of names with dots between, such"),
        ({"extends": "x"}, "--set extends=x: 'extends' works in a file alone"),
        ({"train": {1: 2}}, "--set train={1: 2}: train: the key 1 (int) is not text; put it in q"),
        ({"environment.A_TOKEN": 5}, "--set environment.A_TOKEN=(hidden): environment.A_TOKEN: g"),
    ],
)
def test_wrong_fields_to_change_get_the_messages_of_set(folder, given, said):
    (line,) = refused(RUN, set_options(given), cwd=folder.path)
    assert line.startswith(said)


def test_what_no_file_can_hold_is_named():
    wanted = "expected what YAML has: texts, numbers, true, false, null, lists and mappings"
    assert refused({**RUN, "name": 1j}) == [f"run: got 1j (complex), {wanted}"]
    with pytest.raises(UsageError, match="fields to change: got 1j \\(complex\\), expected"):
        set_options({"name": 1j})


def test_another_type_is_no_run():
    (line,) = refused(5)
    assert line == (
        "run: got a value of type int, expected the path of a run file, a dict with what a run "
        "file has, or an anygauge.RunFile"
    )
