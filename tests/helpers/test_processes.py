"""What ends the processes of tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.processes import bounded, end


def waiting() -> subprocess.Popen[str]:
    """A process that says one thing and then waits."""
    return subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_reading_comes_to_an_end() -> None:
    process = waiting()
    assert process.stdout is not None
    with bounded(process, 1.0):
        assert [line for line in process.stdout if line != "here\n"] == []
    end(process)
    assert process.returncode == -9


def test_what_fails_leaves_no_process() -> None:
    process = waiting()
    with pytest.raises(KeyError), bounded(process):
        raise KeyError
    assert process.returncode == -9
