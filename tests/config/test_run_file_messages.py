"""Every kind of wrong field: one line each, with file, line and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config.describe import ELSEWHERE, kind_at
from anygauge.config.schema import (
    AdapterSection,
    DataSection,
    ModelSection,
    PrecisionSection,
    RunFile,
    Section,
    TrainSection,
)
from anygauge.config.tree import Origin, YamlNode


def names(section: type[Section]) -> str:
    return ", ".join(section.model_fields)


TRAIN = names(TrainSection)
ADAPTER = names(AdapterSection)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "train:\n  optimizer:\n    lr: fast",
            "run.yaml:5: train.optimizer.lr: got 'fast' (str), expected a number > 0",
        ),
        ("train: {optimizer: {lr: 0}}", "train.optimizer.lr: got 0 (int), expected a number > 0"),
        (
            "train: {global_batch_size: 1e3}",
            "train.global_batch_size: got 1e3 (float), expected a whole number > 0; write 1000",
        ),
        (
            "train: {seed: '7'}",
            "train.seed: got '7' (str), expected a whole number >= 0; "
            "write it without quotes and without leading zeros",
        ),
        (
            "train: {steps: true}",
            "train.steps: got true (bool), expected a whole number > 0 or null",
        ),
        (
            "train: {optimizer: {betas: [0.9]}}",
            "train.optimizer.betas: got a list of 1, expected a list of 2: number >= 0 and <= 1, "
            "number >= 0 and <= 1 or null",
        ),
        (
            "train: {optimizer: {betas: [0.9, x]}}",
            "train.optimizer.betas[1]: got 'x' (str), expected a number >= 0 and <= 1",
        ),
        (
            "train: {schedule: {name: cosin}}",
            "train.schedule.name: got 'cosin' (str), expected one of constant, linear, cosine; "
            "did you mean 'cosine'?",
        ),
        ("adapter: {type: dora}", "adapter.type: got 'dora' (str), expected 'lora'"),
        ("adapter: {dropout: 1}", "adapter.dropout: got 1 (int), expected a number >= 0 and < 1"),
        (
            "adapter: {targets: 5}",
            "adapter.targets: got 5 (int), expected text or a list of text; "
            "put it in quotes to make it text",
        ),
        (
            "adapter:\n  targets:\n  - q\n  - 3",
            "run.yaml:6: adapter.targets[1]: got 3 (int), expected text; "
            "put it in quotes to make it text",
        ),
        (
            "adapter: lora",
            f"adapter: got 'lora' (str), expected a mapping of {ADAPTER} or null; write "
            "'adapter.type: lora'",
        ),
        (
            "adapter:",
            "adapter: is left empty; give its fields, '{}' for all defaults, or null for none",
        ),
        (
            "launch: {}\ntrackers: board",
            "run.yaml:4: trackers: got 'board' (str), expected a list of text",
        ),
        (
            "environment: {LEVEL: 4}",
            "environment.LEVEL: got a value of type int (not shown), expected text; put it in "
            "quotes to make it text",
        ),
        ("environment: {4: a}", "environment: the key 4 (int) is not text; put it in quotes"),
        ("train: {on: a}", "train: the key true (bool) is not text; put it in quotes"),
        (
            "backend: on",
            "backend: got on (bool), expected text; put it in quotes, YAML reads on as true",
        ),
        (
            "name: a b",
            "name: got 'a b' (str), expected text matching ^[A-Za-z0-9][A-Za-z0-9._-]*$",
        ),
        (
            f"name: '{'long ' * 40}'",
            f"name: got '{'long ' * 11}l... (str), "
            "expected text matching ^[A-Za-z0-9][A-Za-z0-9._-]*$; at most 128 characters",
        ),
        ("launch: {options: 3}", "launch.options: got 3 (int), expected a mapping"),
        (
            "train: {gradient_checkpointing: 1}",
            "train.gradient_checkpointing: got 1 (int), expected true or false or a mapping of "
            "every, selective",
        ),
        (
            "train: {gradient_checkpointing: {every: 0}}",
            "train.gradient_checkpointing.every: got 0 (int), expected a whole number > 0",
        ),
        (
            "train: {gradient_checkpointing: {layers: 2}}",
            "train.gradient_checkpointing.layers: no such field; valid here: every, selective",
        ),
        (
            "train: {gradient_checkpointing: {selective: true}, activation_offloading: true}",
            "train: 'activation_offloading' does not reach what 'gradient_checkpointing' keeps "
            "with selective: true, since torch keeps it in another place; remove one of them "
            "(activation_offloading: run.yaml:3, gradient_checkpointing: run.yaml:3)",
        ),
    ],
)
def test_wrong_values(folder, minimal, text, complaint):
    if not complaint.startswith("run.yaml:"):
        complaint = f"run.yaml:3: {complaint}"
    assert folder.refuse(minimal + text) == [complaint]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "train: {optimzer: {lr: 1}}",
            f"train.optimzer: no such field; did you mean 'optimizer'? valid here: {TRAIN}",
        ),
        (
            "train: {lr: 1}",
            f"train.lr: no such field; 'lr' belongs under train.optimizer; valid here: {TRAIN}",
        ),
        (
            "train: {learning_rate: 1}",
            "train.learning_rate: no such field; here that is 'train.optimizer.lr'; "
            f"valid here: {TRAIN}",
        ),
        ("train: {zzz: 1}", f"train.zzz: no such field; valid here: {TRAIN}"),
        (
            "adapter: {path: x}",
            "adapter.path: no such field; 'path' belongs under data.train or data.eval; "
            f"valid here: {ADAPTER}",
        ),
        (
            "precision: {backend: x}",
            "precision.backend: no such field; 'backend' belongs under the top level; "
            f"valid here: {names(PrecisionSection)}",
        ),
        (
            "steps: 10",
            "steps: no such field; 'steps' belongs under train; "
            f"valid here: {names(RunFile)}, extends",
        ),
    ],
)
def test_unknown_fields(folder, minimal, text, complaint):
    assert folder.refuse(minimal + text) == [f"run.yaml:3: {complaint}"]


@pytest.mark.parametrize(("name", "target"), sorted(ELSEWHERE.items()))
def test_names_of_other_tools_point_at_fields_that_exist(name, target):
    nowhere = Origin("run.yaml", None, Path())
    zero = YamlNode({"name": YamlNode("zero", nowhere)}, nowhere)
    root = YamlNode({"strategy": zero} if target.startswith("strategy.") else {}, nowhere)
    path, _, value = target.partition(": ")
    kind = kind_at(tuple(path.split(".")), root)
    assert kind is not None
    choices = [choice for member in kind.members for choice in member.choices]
    assert not value or value in choices or not choices
    assert kind_at((name,), root) is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_epochs=3", "here that is 'train.epochs'"),
        ("learning_ratee=3", "did you mean 'train.optimizer.lr'?"),
        ("train.fp32=true", "here that is 'precision.param_dtype: float32'"),
        ("load_in_4bit=true", "here that is 'model.quantise: nf4'"),
        ("train.target_modules=[q_proj]", "here that is 'adapter.targets'"),
        ("adapter.rnk=8", "did you mean 'r'?"),
        ("train.optimizer=adamw_torch", "write 'train.optimizer.name: adamw'"),
        ("data.train=rows.jsonl", "write 'data.train.path: rows.jsonl'"),
        ("precision=bf16", "write 'precision.param_dtype: bfloat16'"),
        ("precision.param_dtype=fp16", "did you mean 'float16'?"),
        ("model.quantise=4bit", "did you mean 'nf4'?"),
        ("train.optimizer.name=adamw_hf", "did you mean 'adamw'?"),
    ],
)
def test_what_users_of_other_tools_type_is_answered_with_ours(folder, minimal, override, said):
    (complaint,) = folder.refuse(minimal, override)
    assert said in complaint
    assert complaint.count("did you mean") <= 1


def test_a_word_that_is_no_field_of_a_section_is_not_suggested(folder, minimal):
    (complaint,) = folder.refuse(minimal, "adapter=qlora")
    assert "write" not in complaint


def test_missing_fields_say_what_they_are_for(folder):
    assert folder.refuse("name: x") == [
        f"run.yaml: model: missing: {ModelSection.__doc__}",
        f"run.yaml: data: missing: {DataSection.__doc__}",
    ]
    assert folder.refuse("model: {name: x}\ndata:\n  train:\n    limit: 3") == [
        "run.yaml:3: data.train.path: missing: "
        "A .json, .jsonl, .csv, .parquet or .txt file, the address of one (https://, hf://, "
        "s3://), or a dataset's name on the hub."
    ]
    assert folder.refuse("model:\ndata: {train: {path: null}}") == [
        f"run.yaml:1: model: got null, expected a mapping of {names(ModelSection)}",
        "run.yaml:2: data.train.path: got null, expected text",
    ]


def test_checks_of_a_whole_section_name_its_line_and_the_fields(folder, minimal):
    text = minimal + "train:\n  schedule:\n    warmup_ratio: 0.1\n"
    assert folder.refuse(text, "train.schedule.warmup_steps=5") == [
        "run.yaml:4: train.schedule: give 'warmup_steps' or 'warmup_ratio', not both "
        "(warmup_steps: --set train.schedule.warmup_steps=5, warmup_ratio: run.yaml:5)"
    ]
    assert folder.refuse("data: {train: {path: x}}\n\nmodel:\n  revision: a\n") == [
        "run.yaml:3: model: give exactly one of 'name' (existing weights) and 'config' (random)"
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
