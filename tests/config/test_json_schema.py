"""The JSON schema against the reader: what an editor flags the command refuses, and the reverse.

`UNSAID` names what a schema cannot say; each of its entries is held to it.
"""

from __future__ import annotations

import copy
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from anygauge.config import describe
from anygauge.config.describe import all_places
from anygauge.config.json_schema import run_file_schema
from anygauge.config.layers import read_command_line, read_files
from anygauge.config.load import load_run_file
from anygauge.config.resolved import dump_run
from anygauge.config.tree import Problem, merge, plain_value
from anygauge.config.yaml_text import write_yaml
from anygauge.interface import AnygaugeError, PluginError, RunFileError
from anygauge.registry import AUTO, installed_plugins
from anygauge.registry.specs import read_options
from anygauge.training.trackers.group import check_trackers
from tests.config.conftest import MINIMAL
from tests.config.test_run_file_messages import BLOCKS
from tests.docs.pages import ROOT, marked

UNSAID = {
    "what fields require of each other": (
        "train: {gradient_checkpointing: {selective: true}",
        "train: / schedule: / warmup_ratio: 0.1 / --set",
        "model: / revision: a",
        "data: {train: {path: a.jsonl}, eval: {path: b.jsonl, weight: 2}}",
        "data: {train: {path: a.jsonl}, shuffle: false, packing: true}",
        "data: {train: {path: a.jsonl}, streaming: true, group_by_length",
        "data: {train: {path: x.csv, weight: 2}, streaming: true}",
        "data: {train: {path: a/b}, eval_fraction: 0.1, streaming: true}",
        "data: {train: {path: x.csv}, eval: {path: a/b}, streaming: true}",
    ),
    "a whole number written as 1e3, and .nan: JSON has one kind of number": (
        "train: {global_batch_size: 1e3}",
        "train: {epochs: .nan}",
    ),
    "a section left empty, which JSON has as null": ("adapter:",),
    "keys that are no text": (
        "environment: {4: a}",
        "strategy: / name: zero / options: / a: {1: x}",
    ),
    "texts that a function of the reader checks: expressions, names, characters": (
        "data: {train: {path: x}, chat_template_kwargs: {tools",
        "data: {train: {path: x}, chat_template_kwargs: {enable-",
        "environment: {A=B: x}",
        'environment: {A: "b',
        'environment: {A: "\\ud800"}',
        "adapter: {targets: '(('}",
        "train: {trainable: ['.*', '(']}",
        "adapter: {groups: [{targets: a}, {targets: 'x{9",
    ),
    "paths, variables in them, and files": (
        "output: ${NOWHERE}/x",
        "output: ~nobody",
        "output: ''",
        'output: "a',
        "extends: $NOWHERE/a.yaml",
        "extends: run.yaml",
    ),
}
EDITORS_YAML = (
    "train: / steps: 1 / seed: 2 / steps: 1",
    "name: !!python/name:os.system",
)
"""Refused by an editor's reader of YAML before it looks at the schema."""
NO_FILE = ("## ", "train.steps", "train..steps", "name=#1", "trackers=[a", "train={", "extends=a")
NO_FILE += ("name=!x",)
"""Overrides that no file has: their own syntax is wrong."""


class EditorLoader(yaml.SafeLoader):
    """YAML 1.2 as yaml-language-server reads it by default: only true and false are booleans."""

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith((":bool", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        self.flatten_mapping(node)
        keys = [key.value for key, _ in node.value]
        if len({*keys}) < len(keys):
            raise yaml.constructor.ConstructorError(None, None, "map keys must be unique")
        # JSON's keys are texts.
        return {key.value: self.construct_object(value, True) for key, value in node.value}


EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile("(?:true|True|TRUE|false|False|FALSE)$"),
    [*"tTfF"],
)
EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    [*"-+.0123456789"],
)


@cache
def validator() -> Draft202012Validator:
    schema, unread = run_file_schema()
    Draft202012Validator.check_schema(schema)
    assert unread == []
    return Draft202012Validator(schema)


def flagged(values: Any) -> list[str]:
    """What an editor flags."""
    return [error.message for error in validator().iter_errors(values)]


def refusal(values: dict[str, Any]) -> str:
    """What the command says of a run file, paths and ranks aside; "" where it takes it."""
    Path("run.yaml").write_text(write_yaml(values), encoding="utf-8")
    registry = installed_plugins()
    try:
        run = load_run_file("run.yaml")
        read_options(registry.find_launcher(run.launch.launcher), run.launch.options)
        read_options(registry.find_objective(run.objective), run.objective_options)
        names = [one.spec.name for one in registry.backends]
        # `auto` is the backend of some machine, and its options are of one backend.
        chosen = names if run.backend == AUTO else [run.backend]
        said = [options_refused(name, run.backend_options) for name in chosen]
        check_trackers(registry, run, None)
    except AnygaugeError as error:
        return str(error)
    return "" if "" in said else said[0]


def options_refused(backend: str, options: Any) -> str:
    try:
        read_options(installed_plugins().find_backend(backend), options)
    except AnygaugeError as error:
        return str(error)
    return ""


# -- the files of the message tests ----------------------------------------------------------------


def file_of(block: str) -> tuple[str, list[str], str]:
    """A block's run file, its overrides, and its name here."""
    lines = [line for line in block.split("\n") if not line.startswith("> ")]
    given = [line for line in lines if not line.startswith("--set ")]
    sections = {line.partition(":")[0] for line in given}
    base = [line for line in MINIMAL.splitlines() if line.partition(":")[0] not in sections]
    overrides = [line.removeprefix("--set ") for line in lines if line.startswith("--set ")]
    return "\n".join([*base, *given]), overrides, " / ".join(line.strip() for line in lines)


def unsaid(name: str) -> list[str]:
    return [start for starts in UNSAID.values() for start in starts if is_block(name, start)]


def is_block(name: str, start: str) -> bool:
    return name == start if start.endswith(":") else name.startswith(start)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.partition("\n")[0][:50])
def test_what_the_command_refuses_an_editor_flags(block: str, folder: Any) -> None:
    text, overrides, name = file_of(block)
    if name.removeprefix("--set ").startswith(NO_FILE) or name == "--set train.steps=":
        return
    folder.write("run.yaml", text)
    with pytest.raises(RunFileError):
        load_run_file("run.yaml", overrides)
    try:
        values = yaml.load(text, EditorLoader)
    except yaml.YAMLError:
        assert name.startswith(EDITORS_YAML)
        return
    if overrides:
        problems: list[Problem] = []
        root = read_files(Path.cwd() / "run.yaml", "run.yaml", os.environ, problems)
        values = plain_value(merge(root, read_command_line(overrides, {}, Path.cwd(), problems)))
        assert problems == []
    assert bool(flagged(values)) is not bool(unsaid(name)), name


def test_what_a_schema_cannot_say_is_of_a_block() -> None:
    names = [file_of(block)[2] for block in BLOCKS]
    for start in (*EDITORS_YAML, *(one for starts in UNSAID.values() for one in starts)):
        assert sum(is_block(name, start) for name in names) == 1, start


# -- every field, with values right and wrong ------------------------------------------------------

VALUES: tuple[Any, ...] = (None, True, 3, 0.5, "x", "", [None], {})
CHOSEN = {"strategy": "strategy", "backend": "backend", "launcher": "launch", "tracker": "trackers"}
CHOSEN |= {"objective": "objective"}
BASE: dict[str, Any] = {"model": {"name": "m"}, "data": {"train": {"path": "rows.jsonl"}}}
CHECKED_BY_CODE = (
    "is not a path",  # empty
    "give exactly one of 'name'",
    "an absolute path without commas is needed",
    "a remote shell reads this path",
    "mpirun splits this path",
    "is a setting of warmup_stable_decay, not of cosine",
    "needs evaluations during the run",
)
"""What the reader alone says of such values."""


@pytest.mark.parametrize(
    "place", all_places()[0], ids=lambda one: f"{one.owner} {'.'.join(one.path)}"
)
def test_each_field_takes_the_same_values(place: Any, folder: Any) -> None:
    kind, _, name = place.owner.partition(" ")
    tried = 0
    for field in place.section.model_fields:
        for value in VALUES:
            run = copy.deepcopy(BASE)
            chosen = {"strategy": {"name": name}, "launcher": {"launcher": name}, "tracker": [name]}
            if kind == "optimizer":
                run["train"] = {"optimizer": {"name": name}}
            elif kind:
                run[CHOSEN[kind]] = chosen.get(kind, name)
            at: Any = run
            for part in place.path:
                at = at.setdefault(part, {})
            at[field] = value
            said, marks = refusal(run), flagged(run)
            by_code = any(text in said for text in CHECKED_BY_CODE)
            assert bool(said) is bool(marks) or (by_code and not marks), (field, value, said, marks)
            tried += 1
    assert tried == len(VALUES) * len(place.section.model_fields)


# -- files that are right --------------------------------------------------------------------------

EXAMPLES = sorted(ROOT.glob("examples/**/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_example_is_flagged(path: Path) -> None:
    assert flagged(yaml.load(path.read_text(), EditorLoader)) == []


@pytest.mark.parametrize("block", marked("run-file"), ids=str)
def test_no_run_file_of_the_pages_is_flagged(block: Any) -> None:
    above = {"extends": block.option("over")} if block.option("over") else {}
    assert flagged({**above, **yaml.load(block.text, EditorLoader)}) == []


@pytest.mark.parametrize("strategy", ["auto", "zero", "mics", "pipeline"])
def test_a_resolved_run_file_is_not_flagged(strategy: str, folder: Any) -> None:
    run = folder.load(MINIMAL + f"adapter: {{}}\nstrategy: {strategy}\n")
    assert flagged(yaml.safe_load(dump_run(run))) == []


@pytest.mark.parametrize(
    "text",
    [
        "strategy: tensor",
        "strategy: {name: null}",
        "strategy: {name: mics, offload: both}",
        "data: {train: [{path: a}, {path: b, weight: 2}], cache: false}",
        "data: {train: {path: a}, cache: off, packing: isolate}",
        "model: {name: m, quantize: nf4}",
        "model: {name: m, quantize: {type: int8}}",
        "adapter: {targets: [q_proj], groups: [{targets: v_proj}]}",
        "adapter: {targets: .*q_proj}",
        "train: {gradient_checkpointing: {every: 2}, steps: null, optimizer: null}",
        "train: {gradient_checkpointing: false, optimizer: {lr: 1, betas: [0, 0.9]}}",
        "train: {optimizer: {name: muon, momentum: null, ns_steps: 3, eps: 1e-6}}",
        "environment: {A: null, B: text}",
        "kernels: {rms_norm: null}",
        "backend: hpu\nbackend_options: {mode: lazy, graph_limit: null}",
        "backend_options: {mode: lazy}",
        "launch: {options: {grace_s: 3}}",
        "launch: {launcher: slurm, options: {partition: null, gpus_per_node: a100:8}}",
        "trackers: [jsonl]\ntracker_options: {jsonl: {path: a}}",
        "extends: null",
        "extends: []",
    ],
)  # fmt: skip
def test_every_spelling_that_the_reader_takes(text: str, folder: Any) -> None:
    values = yaml.load(text, EditorLoader)
    run = {**BASE, **values}
    assert refusal(run) == ""
    assert flagged(run) == []


# -- extends, and what plugins require ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train: {steps: 3}", []),
        ("data: {train: {limit: 3}}", []),
        ("strategy: {stage: 2}", []),
        ("model: {quantize: {compute_dtype: float32}}", []),
        ("launch: {launcher: kubernetes, options: {storage: {path: /a}}}", []),
        ("launch: {options: {partition: a}}", []),
        ("trackers: [jsonl]", []),
        ("data: {train: [{limit: 3}]}", ["'path' is a required property"]),
        ("adapter: {groups: [{r: 3}]}", ["'targets' is a required property"]),
        ("model: null", ["None is not of type 'object'"]),
        ("train: {stepz: 3}", ["unexpected"]),
        ("train: {optimizer: {momentum: 0.5}}", []),
        ("train: {optimizer: {momentun: 0.5}}", ["is not valid under any of the given schemas"]),
        ("strategy: {stag: 2}", ["is not valid under any of the given schemas"]),
    ],
)
def test_a_file_with_extends_is_not_asked_for_required_fields(
    text: str, wanted: list[str], folder: Any
) -> None:
    folder.write("base.yaml", f"{MINIMAL}strategy: zero\n")
    for extends in ("base.yaml", ["base.yaml"]):
        values = {"extends": extends, **yaml.safe_load(text)}
        assert [part for part in wanted if part not in " ".join(deep(values))] == []
        assert bool(flagged(values)) is bool(wanted)
    assert flagged({"extends": [], **yaml.safe_load(text)})
    assert flagged(yaml.safe_load(text))


def deep(values: Any) -> list[str]:
    """Messages of all errors, and of those below them."""
    found, stack = [], [*validator().iter_errors(values)]
    while stack:
        error = stack.pop()
        found.append(error.message)
        stack += error.context or ()
    return found


@pytest.mark.parametrize(
    "text",
    [
        "launch: {launcher: kubernetes}",
        "launch: {launcher: kubernetes, options: null}",
        "launch: {launcher: kubernetes, options: {storage: {path: /a}}}",
        "launch: {launcher: local, options: {storage: {claim: a}}}",
        "launch: {options: {partition: a}}",
        "launch: {launcher: nowhere}",
        "trackers: [jsonl]",
        "trackers: [jsonl]\ntracker_options: {jsonl: {}}",
        "trackers: [nothing]",
        "trackers: [wandb, wandb]",
        "trackers: [wandb]\ntracker_options: {wandb: {projekt: a}}",
        "backend: gpu",
        "backend: cpu\nbackend_options: {mode: lazy}",
        "backend_options: {no_such: 1}",
    ],
)
def test_options_are_those_of_the_plugin_that_is_named(text: str, folder: Any) -> None:
    run = {**BASE, **yaml.safe_load(text)}
    assert refusal(run) != ""
    assert flagged(run)


def test_options_that_cannot_be_read_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    real = describe.load_options

    def broken(provided: Any) -> Any:
        if provided.spec.name == "slurm":
            raise PluginError("slurm's options cannot be loaded")
        return real(provided)

    monkeypatch.setattr(describe, "load_options", broken)
    schema, unread = run_file_schema()
    assert unread == ["slurm's options cannot be loaded"]
    check = Draft202012Validator(schema)
    assert check.is_valid({**BASE, "launch": {"launcher": "slurm", "options": {"any": 1}}})
    assert not check.is_valid({**BASE, "launch": {"launcher": "ssh", "options": {"any": 1}}})


# -- what editors show ----------------------------------------------------------------------------


def test_each_field_has_its_meaning_and_a_default_that_it_takes() -> None:
    schema, seen = run_file_schema()[0], 0
    for section in (schema, *schema["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            assert field.get("description"), name
            if "default" in field:
                check = validator().evolve(schema={"$defs": schema["$defs"], **field})
                assert check.is_valid(field["default"]), (name, field["default"])
                seen += 1
    assert seen > 200
