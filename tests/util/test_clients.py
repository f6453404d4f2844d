"""Command-line clients of clusters: their answers, their refusals, and those that do not answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from anygauge.util.clients import (
    NoAnswerError,
    NotInstalledError,
    client_output,
    first_and_last,
    run_client,
)

PYTHON = (sys.executable, "-I", "-S", "-c")


def test_an_answer_comes_back_whatever_its_status() -> None:
    done = run_client(
        (*PYTHON, "import sys; print(sys.stdin.read()); sys.exit(3)"), stdin="雪 $HOME"
    )
    assert (done.returncode, done.stdout) == (3, "雪 $HOME\n")
    assert run_client((*PYTHON, "import sys; print(sys.stdin.read())")).stdout == "\n"


def test_a_client_that_is_missing_or_silent_is_named() -> None:
    with pytest.raises(NotInstalledError, match="no-such-client is not installed here"):
        run_client(("no-such-client", "get"))
    with pytest.raises(NoAnswerError, match=r"did not answer within 0\.2 s"):
        run_client((*PYTHON, "import time; time.sleep(60)"), timeout_s=0.2)


def test_of_a_refusal_the_errors_are_shown_or_else_the_output() -> None:
    def refused(out: str, err: str) -> str:
        return client_output(subprocess.CompletedProcess((), 1, out, err))

    assert refused("out\n", "\nfirst  \n\nsecond\n") == "first\n  second"
    assert refused("out\n", "") == "out"


def test_of_many_lines_the_first_and_the_last_are_kept() -> None:
    assert first_and_last(["a", " ", "b", "c", "d", "e"], 2) == ["a", "b", "...", "d", "e"]
    assert first_and_last(["a", "", "b", "c", "d"], 2) == ["a", "b", "c", "d"]
