"""Reading YAML, `extends`, and files that are not run files."""

from __future__ import annotations

import os
from operator import attrgetter

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.resolved import parse_run, run_json
from anygauge.interface import RunFileError


def test_a_minimal_file_gets_all_defaults(folder, minimal):
    run = folder.load(minimal)
    assert run.model.name == "some/model"
    assert run.train.optimizer.lr == 2e-4
    assert run.adapter is None


SCALARS = {
    "numbers, as people write them": {"2e-4": 2e-4, "1e5": 1e5, "1E+2": 100.0, ".5": 0.5, "3": 3},
    "text, as it is no number": {
        text: text
        for text in (
            "12:30:00",
            "1:30",
            "010",
            "0o17",
            "2024-01-31",
            "2024-01-31 10:00",
            "1e",
            "e5",
        )
    },
    "safe YAML": {
        **{"yes": True, "[~]": [None], "0x10": 16, "1_000": 1000, "'5'": "5"},
        "[1, {g: off}]": [1, {"g": False}],
    },
}


@pytest.mark.parametrize("kind", SCALARS)
def test_values(folder, minimal, kind):
    text = "".join(f"    k{n}: {written}\n" for n, written in enumerate(SCALARS[kind]))
    found = folder.load(f"{minimal}launch:\n  options:\n{text}").launch.options
    assert [*found.values()] == [*SCALARS[kind].values()]
    assert [*map(type, found.values())] == [*map(type, SCALARS[kind].values())]


def test_anchors_and_merge_keys(folder, minimal):
    text = """
    strategy:
      name: zero
      options: {base: &b {x: 1, y: 2}, one: {y: 3, <<: *b}, two: {<<: [{x: 5}, *b]}}
    """
    run = folder.load(minimal + text.replace("\n    ", "\n") + "backend_options: {c: *b}")
    options = run.strategy.options
    assert options["one"] == {"x": 1, "y": 3}
    assert options["two"] == {"x": 5, "y": 2}
    assert run.backend_options == {"c": {"x": 1, "y": 2}}


def test_extends_merges_mappings_replaces_lists_and_null_resets(folder):
    folder.write(
        "bases/base.yaml",
        """\
        model: {name: some/model}
        data: {train: {path: rows.jsonl}}
        adapter: {r: 4, targets: [a, b]}
        train: {steps: 5, max_grad_norm: 2.0, optimizer: {lr: 1e-3, eps: 1e-6}}
        trackers: [x, y]
        """,
    )
    run = folder.load(
        """\
        extends: bases/base.yaml
        adapter: {targets: [c]}
        train: {steps: null, max_grad_norm: null, optimizer: {lr: 1e-4}}
        trackers: [z]
        """
    )
    assert (run.adapter.r, run.adapter.targets, run.trackers) == (4, ["c"], ["z"])
    assert (run.train.steps, run.train.max_grad_norm) == (None, 1.0)
    assert (run.train.optimizer.lr, run.train.optimizer.eps) == (1e-4, 1e-6)


def test_null_resets_a_field_takes_a_section_away_and_is_a_value_where_names_are_free(
    folder, minimal
):
    names = ("backend_options", "environment", "kernels", "launch.options")
    given = [f"{name}.{key}={key}" for name in names for key in "ab"]
    nulls = [f"{name}.a=null" for name in names]
    run = folder.load(minimal, *given, *nulls)
    assert [attrgetter(name)(run) for name in names] == [{"b": "b"}] * 4
    folder.write("a.yaml", minimal + "adapter: {r: 4, alpha: 7}\n")
    folder.write("b.yaml", "extends: a.yaml\nadapter: null\n")
    assert folder.load("extends: b.yaml").adapter is None
    adapter = folder.load("extends: b.yaml\nadapter: {r: 2}").adapter
    assert (adapter.r, adapter.alpha) == (2, 32)
    config = "model={config: {model_type: llama, rope: 1}, tokenizer: a/b, name: null}"
    run = folder.load(minimal, config, "model.config.rope=null")
    assert run.model.config == {"model_type": "llama", "rope": None}


def test_a_list_of_bases_and_a_base_reached_twice(folder, minimal):
    folder.write(
        "root.yaml", minimal + "name: root\ntrain: {seed: 1, steps: 1, max_grad_norm: 1}\n"
    )
    folder.write("a.yaml", "extends: root.yaml\nname: a\ntrain: {steps: 2, seed: 2}\n")
    folder.write("b.yaml", "name: b\ntrain: {seed: 3}\n")
    run = folder.load("extends: [a.yaml, b.yaml]\ntrain: {max_grad_norm: 4}")
    assert (run.name, run.train.seed, run.train.steps, run.train.max_grad_norm) == ("b", 3, 2, 4)


def test_every_value_knows_where_it_was_written(folder, minimal):
    folder.write("sub/base.yaml", minimal + "train:\n  steps: 5\n  max_grad_norm: 2\n")
    loaded = folder.load(
        "extends: sub/base.yaml\n\ntrain:\n  steps: 6\n",
        "train.seed=3",
        flags={"launch.devices": 2},
    )
    assert str(loaded.origin("train.steps")) == "run.yaml:4"
    assert str(loaded.origin("train.max_grad_norm")) == "sub/base.yaml:5"
    assert str(loaded.origin("train.seed")) == "--set train.seed=3"
    assert str(loaded.origin("launch.devices")) == "--devices"
    assert not loaded.has_value("train.micro_batch_size")
    assert str(loaded.origin("train.micro_batch_size")) == "run.yaml:3"
    assert str(loaded.origin("strategy.name")) == "run.yaml"
    assert str(loaded.error("train.max_grad_norm", "too large")) == (
        "run.yaml: 1 problem\n  sub/base.yaml:5: train.max_grad_norm: too large"
    )
    copy, handed_on = loaded.model_copy(), parse_run(run_json(loaded))
    assert str(copy.origin("train.seed")) == "--set train.seed=3"
    assert copy == loaded == handed_on, "a place is no part of what a run is"
    assert "run file: train.seed: too large" in str(handed_on.error("train.seed", "too large"))


def test_a_circle_of_files_is_named_in_full(folder):
    folder.write("a.yaml", "extends: sub/b.yaml\n")
    folder.write("sub/b.yaml", "name: b\nextends: ../run.yaml\n")
    assert folder.refuse("extends: a.yaml") == [
        "sub/b.yaml:2: extends: goes in a circle: "
        "run.yaml extends a.yaml extends sub/b.yaml extends ../run.yaml"
    ]


def test_extends_of_what_is_not_there(folder, minimal):
    folder.write("bases/base.yaml", minimal)
    assert folder.refuse("\nextends:\n - bases/bsae.yaml\n") == [
        f"run.yaml:3: extends: no such file: {folder.path}/bases/bsae.yaml; "
        "did you mean 'base.yaml'?"
    ]
    assert folder.refuse("extends: bases") == [
        f"run.yaml:1: extends: no such file: {folder.path}/bases"
    ]


EMPTY = "run.yaml: is empty; a run file needs at least 'model' and 'data'"
NO_MAPPING = "expected a mapping such as 'model: {...}' at the top"
LARGE = "not valid YAML: a number is too large (an escape \\U has at most 0010FFFF)"
DEEP = "run.yaml: not valid YAML: nested too deeply, or an alias stands in its own value"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", EMPTY),
        (b"# x\n\n", EMPTY),
        (b"- a\n- b\n", f"run.yaml:1: got a list of 2, {NO_MAPPING}"),
        (b"\nhello\n", f"run.yaml:2: got 'hello' (str), {NO_MAPPING}"),
        (b"\xff\xfe\x00", "run.yaml: is not text in UTF-8 (byte 0); expected a run file in YAML"),
        (
            b"a: 1\nb: \x07\n",
            "run.yaml:2: not valid YAML: the character U+0007 is not allowed in YAML",
        ),
        (
            b"a: 1\nb: [1, 2\nc: 3\n",
            "run.yaml:3: not valid YAML: while parsing a flow sequence, "
            "expected ',' or ']', but got ':'",
        ),
        (
            b"train:\n\tsteps: 1\n",
            "run.yaml:2: not valid YAML: while scanning for the next token, found character '\\t' "
            "that cannot start any token; indent with spaces",
        ),
        (
            b"a: 1\n---\nb: 2\n",
            "run.yaml:2: not valid YAML: expected a single document in the stream, "
            "but found another document",
        ),
        (b"backend_options: &loop\n  again: *loop\n", DEEP),
        (b"[" * 6000, DEEP),
        (b'a: 1\nb: "\\U00110000"\n', f"run.yaml:2: {LARGE}"),
        (b'a: "\\UFFFFFFFF"', f"run.yaml:1: {LARGE}"),
        (b"%YAML " + b"1" * 5000 + b".2\n---\na: 1\n", f"run.yaml:1: {LARGE}"),
        (b"# " + b"x" * 2**20, "run.yaml: cannot be read: it is longer than 1 MiB"),
    ],
)
def test_files_that_are_no_run_files(folder, content, complaint):
    (folder.path / "run.yaml").write_bytes(content)
    with pytest.raises(RunFileError) as caught:
        load_run_file("run.yaml")
    assert str(caught.value) == complaint
    assert caught.value.exit_status == 2


def test_files_that_are_not_there(folder, minimal):
    folder.write("configs/first.yaml", minimal)
    folder.write("configs/second.yml", minimal)
    os.mkfifo("pipe")
    for path, complaint in {
        "configs/frist.yaml": "configs/frist.yaml: no such file; did you mean 'first.yaml'?",
        "nowhere/a.yaml": "nowhere/a.yaml: no such file",
        "configs": "configs: is a folder, expected a run file; it holds first.yaml, second.yml",
        "configs/first.yaml/x": "configs/first.yaml/x: cannot be read: Not a directory",
        "pipe": "pipe: cannot be read: it is a named pipe, not a regular file",
        "/dev/zero": "/dev/zero: cannot be read: it is a device or socket, not a regular file",
    }.items():
        with pytest.raises(RunFileError) as caught:
            load_run_file(path)
        assert str(caught.value) == complaint


def test_a_byte_order_mark_and_windows_line_ends_are_read(folder, minimal):
    text = minimal + "train:\n  steps: x\n"
    (folder.path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    with pytest.raises(RunFileError, match=r"run\.yaml:4: train\.steps: got 'x'"):
        load_run_file("run.yaml")
