"""Every kind of wrong field: one line each, with file, line and what would be right.

The messages stand in `messages.txt` as they are said; what needs more is below.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anygauge.config.describe import kind_of_run
from anygauge.config.problems import PEER_ALIASES
from anygauge.config.schema import (
    AdapterSection,
    DataSection,
    ModelSection,
    PrecisionSection,
    RunFile,
    Section,
    TrainSection,
)
from anygauge.config.sections import OptimizerSection
from anygauge.config.tree import Origin, YamlNode
from anygauge.interface import RunFileError

FIELDS = {
    "run file": RunFile,
    "train": TrainSection,
    "adapter": AdapterSection,
    "precision": PrecisionSection,
}
FIRST, *PARTS = Path(__file__).with_name("messages.txt").read_text("utf-8").split("\n\n")
BLOCKS = [part.rstrip("\n") for part in PARTS if not part.startswith("## ")]


def names(section: type[Section]) -> str:
    return ", ".join(section.model_fields)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.partition("\n")[0][:50])
def test_what_is_said_of_a_run_file(folder, minimal, block):
    lines = block.split("\n")
    given = [line for line in lines if not line.startswith(("--set ", "> "))]
    sections = {line.partition(":")[0] for line in given}
    base = [line for line in minimal.splitlines() if line.partition(":")[0] not in sections]
    overrides = [line.removeprefix("--set ") for line in lines if line.startswith("--set ")]
    complaints = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    found = folder.refuse("\n".join([*base, *given]), *overrides)
    assert len(found) == len(complaints) > 0, found
    for line, wanted in zip(found, complaints, strict=True):
        for name, section in FIELDS.items():
            wanted = wanted.replace(f"{{{name}}}", names(section))
        assert re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), line), line
        assert line.count("did you mean") <= 1


@pytest.mark.parametrize(("name", "target"), sorted(PEER_ALIASES.items()))
def test_names_of_other_tools_point_at_fields_that_exist(name, target):
    nowhere = Origin("run.yaml", None, Path())
    zero = YamlNode({"name": YamlNode("zero", nowhere)}, nowhere)
    root = YamlNode({"strategy": zero} if target.startswith("strategy.") else {}, nowhere)
    path, _, value = target.partition(": ")
    run = kind_of_run(root)
    kind = run.descendant(tuple(path.split(".")))
    assert kind is not None
    choices = [choice for member in kind.members for choice in member.choices]
    choices = [*OptimizerSection.of_plugins()] if path == "train.optimizer.name" else choices
    assert not value or value in choices or not choices
    assert run.descendant((name,)) is None


def test_missing_sections_say_what_they_are_for(folder):
    assert folder.refuse("name: x") == [
        f"run.yaml: model: missing: {ModelSection.__doc__}",
        f"run.yaml: data: missing: {DataSection.__doc__}",
    ]


def test_all_problems_are_told_together_in_the_order_of_the_files(folder):
    folder.write("bases/base.yaml", "train:\n  seed: -1\n\n  max_grad_norm: x\nmodel: {nam: a}\n")
    text = "extends: bases/base.yaml\ntrackers: [1]\n\ndata: {train: {path: a}}\nbackend: 3\n"
    lines = folder.refuse(text, "train.foo=1", flags={"launch.devices": 0})
    assert [line.split(": ")[:2] for line in lines] == [
        ["run.yaml:2", "trackers[0]"],
        ["run.yaml:5", "backend"],
        ["bases/base.yaml:2", "train.seed"],
        ["bases/base.yaml:4", "train.max_grad_norm"],
        ["bases/base.yaml:5", "model.nam"],
        ["--set train.foo=1", "train.foo"],
        ["--devices", "launch.devices"],
    ]
    assert lines[6] == "--devices: launch.devices: got 0 (int), expected a whole number > 0"
    assert lines[4].startswith(
        "bases/base.yaml:5: model.nam: no such field; did you mean 'name'? valid here: name, rev"
    )


def test_thousands_of_complaints_are_cut(folder, minimal):
    with pytest.raises(RunFileError) as caught:
        folder.load(minimal + "train:\n" + "".join(f"  k{n}: {n}\n" for n in range(3000)))
    header, *lines = str(caught.value).split("\n")
    assert header == "run.yaml: more than 50 problems, first"
    assert len(lines) == 50
    assert "train.k0: no such field" in lines[0]
