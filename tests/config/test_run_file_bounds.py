"""Run files that are not meant well, or not meant so: each is refused at once, with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.interface import RunFileError


def test_aliases_are_of_use_all_the_same(folder, minimal):
    text = "strategy: {name: zero, options: &o {a: [1, 2]}}\nbackend_options: {b: *o, c: *o}"
    run = folder.load(minimal + text)
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
        ('environment: {"A\\0": x}', "environment.A\0: 'A\\x00' cannot be the name of a variable"),
        (f"train: {{seed: 0x{'f' * 5000}}}", "train.seed: 0xfff"),
    ],
    ids=["NUL", "large"],
)
def test_values_that_no_page_could_show(folder, minimal, text, complaint):
    """The others: `messages.txt`."""
    (line,) = folder.refuse(minimal + text)
    assert line.startswith(f"run.yaml:3: {complaint}")
