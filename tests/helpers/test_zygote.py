"""Forks of the process that has imported everything: what they see, and how they end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.zygote import Fork, is_early, run_forks


def fork(folder: Path, name: str, ending: str) -> Fork:
    """This module as a process, which prints to files of its name."""
    return Fork(
        module="tests.helpers.test_zygote",
        arguments=[ending],
        log=str(folder / f"{name}.out"),
        errors=str(folder / f"{name}.err"),
        folder=str(folder),
        environment={"WHO": name},
    )


def test_each_has_its_variables_folder_output_and_status(tmp_path: Path) -> None:
    codes = run_forks([fork(tmp_path, "one", "3"), fork(tmp_path, "two", "0")], timeout_s=300)
    assert codes == [3, 0]
    for name in ("one", "two"):
        assert (tmp_path / f"{name}.out").read_text() == f"{name} in {tmp_path}\n"
        assert (tmp_path / f"{name}.err").read_text() == "torch is there\n"


def test_what_hangs_is_killed(tmp_path: Path) -> None:
    assert run_forks([fork(tmp_path, "one", "hang")], timeout_s=0.1) == [-9]


def test_what_imports_read_needs_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_early({"PATH": "/nowhere"})
    assert is_early({"PYTHONPATH": "/nowhere"})
    monkeypatch.setenv("ANYGAUGE_ANYTHING", "else")
    assert is_early({})


if __name__ == "__main__":
    print(f"{os.environ['WHO']} in {Path.cwd()}")
    print("torch is there" if "torch" in sys.modules else "no torch", file=sys.stderr)
    if sys.argv[1] == "hang":
        time.sleep(600)
    sys.exit(int(sys.argv[1]))
