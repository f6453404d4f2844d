"""The run as the command hands it on: the same run again, and what is not one is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from anygauge.config.resolved import parse_run, read_run, run_json
from anygauge.interface import AnygaugeError


def test_a_number_without_an_end_stays_one(folder, minimal) -> None:
    run = folder.load(minimal + "launch: {options: {a: .inf, b: [-.inf, .nan]}}").run
    again = parse_run(run_json(run)).launch.options
    assert again["a"] == math.inf and again["b"][0] == -math.inf and math.isnan(again["b"][1])


def test_fields_that_an_adapter_decides_are_left_to_it(folder, minimal) -> None:
    (folder.path / "a").mkdir()
    run = folder.load(minimal + "adapter: {start_from: a, alpha: 32}").run
    again = parse_run(run_json(run)).adapter
    assert again is not None and again.given == {"alpha"}


def test_another_versions_run_is_refused(folder, minimal, tmp_path: Path) -> None:
    values = json.loads(run_json(folder.load(minimal).run))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**values, "train": {**values["train"], "clip": 1.0}}))
    told = (
        r"run.json: this is not a resolved run .* \('train.clip' is unknown\). .* same version\?$"
    )
    with pytest.raises(AnygaugeError, match=told):
        read_run(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "name: t\n", '{"name": 3}'])
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(AnygaugeError, match="this is not a resolved run of the installed version"):
        parse_run(text)


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AnygaugeError, match=r"run\.json: .*No such file"):
        read_run(tmp_path / "run.json")
