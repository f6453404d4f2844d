"""Run files that are not meant well, or not meant so: each is refused at once, with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.interface import RunFileError


def test_aliases_are_of_use_all_the_same(folder, minimal):
    text = "strategy: {name: zero, options: &o {a: [1, 2]}}\nbackend_options: {b: *o, c: *o}"
    run = folder.load(minimal + text).run
    assert run.backend_options == {"b": {"a": [1, 2]}, "c": {"a": [1, 2]}}


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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("environment: {A=B: x}", "environment.A=B: 'A=B' cannot be the name of a variable"),
        ('environment: {"A\\0": x}', "environment.A\0: 'A\\x00' cannot be the name of a variable"),
        ('environment: {A: "b\\0c"}', "environment.A: the value holds a NUL"),
        ('environment: {A: "\\ud800"}', "environment.A: holds half of a surrogate pair (U+D800)"),
        ("train: {epochs: .inf}", "train.epochs: got .inf (float), expected a number > 0; the la"),
        ("train: {epochs: .nan}", "train.epochs: got .nan (float), expected a number > 0"),
        ("launch: {collective_timeout_s: .inf}", "launch.collective_timeout_s: got .inf (float)"),
        ("launch: {lost_after_s: 1e7}", "launch.lost_after_s: got 1e7 (float), expected a number"),
        ("checkpoint: {grace_s: 1e300}", "checkpoint.grace_s: got 1e300 (float), expected"),
        (
            "train: {max_grad_norm: .inf}",
            "train.max_grad_norm: got .inf (float), expected a number >= 0",
        ),
        ("train: {system_every_s: 1e300}", "train.system_every_s: got 1e300 (float), expected"),
        (f"train: {{seed: {2**63}}}", f"train.seed: {2**63} is a whole number beyond 64 bits"),
        (f"train: {{seed: 0x{'f' * 5000}}}", "train.seed: 0xfff"),
        (
            "train: {steps: 99999999999}",
            "train.steps: got 99999999999 (int), expected a whole number > 0 or null; the largest "
            "is 2_147_483_647",
        ),
        (
            "train: {global_batch_size: 2000000}",
            "train.global_batch_size: got 2000000 (int), expected a",
        ),
        ("adapter: {r: 99999999999}", "adapter.r: got 99999999999 (int), expected a"),
        ("adapter: {alpha: 1e300}", "adapter.alpha: got 1e300 (float), expected a number > 0; the"),
        ("data: {max_length: 1}", "data.max_length: got 1 (int), expected a whole number >= 2"),
        (
            "adapter: {targets: '(('}",
            "adapter.targets: '((' is not a regular expression (missing ), unterminated subpattern",
        ),
        (
            "adapter: {groups: [{targets: a}, {targets: 'x{99999999999}'}]}",
            "adapter.groups[1].targets: 'x{99999999999}' is not a regular expression (the",
        ),
    ],
)
def test_values_that_no_run_could_use(folder, minimal, text, complaint):
    (line,) = folder.refuse(merged(minimal, text))
    assert line.startswith(f"run.yaml:{2 if text.startswith('data') else 3}: {complaint}")


def merged(minimal: str, text: str) -> str:
    if text.startswith("data: {"):
        return minimal.replace("data: {", text.removesuffix("}") + ", ")
    return minimal + text
