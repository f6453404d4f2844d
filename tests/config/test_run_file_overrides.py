"""`--set a.b=c` and options of their own."""

from __future__ import annotations

import json

NAMES = ["a: b", "# é\n", "12:30", "\"'\\", "\x7f\u2028", ""]


def test_values_are_yaml_and_win_over_the_file(folder, minimal):
    run = folder.load(
        minimal + "train: {steps: 5, seed: 3}\nadapter: {r: 4}\n",
        "train.steps=10",
        "train.optimizer.lr=1e-5",
        "adapter.targets=[q_proj,v_proj]",
        'model.revision="123"',
        "launch.options={time: 12:30:00}",
        "launch.options.account=a=b",
        f"trackers={json.dumps(NAMES)}",
    )
    assert (run.train.steps, run.train.seed, run.train.optimizer.lr) == (10, 3, 1e-5)
    assert (run.adapter.r, run.adapter.targets) == (4, ["q_proj", "v_proj"])
    assert run.model.revision == "123"
    assert run.launch.options == {"time": "12:30:00", "account": "a=b"}
    assert run.trackers == NAMES, "JSON is YAML"


def test_null_resets_a_path_below_nothing_begins_a_section_and_the_last_wins(folder, minimal):
    text = minimal + "adapter: {r: 4}\ntrain: {seed: 4}\n"
    run = folder.load(text, "adapter=null", "train.seed=null")
    assert (run.adapter, run.train.seed) == (None, 0)
    assert folder.load(minimal, "adapter={}").adapter.r == 16
    assert folder.load(minimal, "adapter.r=2").adapter.r == 2
    assert folder.load(minimal, "train.seed=1", "train.seed=2").train.seed == 2


def test_flags_win_and_one_that_was_not_given_is_left_alone(folder, minimal):
    text = minimal + "backend: a\nlaunch: {devices: 2, nodes: 3}\n"
    flags = {"backend": "b", "launch.devices": None, "output": "out"}
    run = folder.load(text, flags=flags)
    assert (run.backend, run.launch.devices, run.launch.nodes) == ("b", 2, 3)
    assert run.output == str(folder.path / "out")


def test_flags_and_overrides_must_not_contradict_each_other(folder, minimal):
    assert folder.refuse(minimal, "launch.devices=4", flags={"launch.devices": 2}) == [
        "--devices: launch.devices: contradicts --set launch.devices=4; give one of them"
    ]
    same = folder.load(minimal, "launch.devices=2", flags={"launch.devices": 2})
    assert same.launch.devices == 2
