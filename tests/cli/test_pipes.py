"""Pipes whose other end goes away: a reader of what is printed, an ssh that is spoken to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge import cli
from anygauge.cli.answers import EMPTY_ANSWER
from tests.helpers.child_processes import begin, bounded, running, until
from tests.helpers.runs import anygauge, run_file, trained_here

SSH = """#!/bin/sh
echo "ssh: connect to host away port 22: No route to host" >&2
exit 255
"""


def test_an_ssh_that_went_away_does_not_take_the_command_along(tmp_path: Path) -> None:
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    launch = {
        "launcher": "ssh",
        "nodes": 2,
        "options": {"hosts": ["away", "gone"]},
        # More than a pipe holds: it is still being told when it dies.
        "pass_environment": ["ONE", "TWO"],
    }
    done = anygauge(
        ["launch", run_file(tmp_path, launch=launch)],
        environment={
            **{"PATH": f"{program.parent}:{os.environ['PATH']}"},
            **{"ONE": "1" * 100_000, "TWO": "2" * 100_000},
        },
        timeout_s=120,
    )
    assert done.returncode == 1, done
    assert "No route to host" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["backends"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_another_pipe_that_breaks_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(arguments: list[str], *, own_process: bool) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "run", broken)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)  # pytest's own output continues
    with pytest.raises(SystemExit):
        cli.main()
    assert "a helper process ended while anygauge wrote to it" in capfd.readouterr().err


def test_a_run_whose_reader_goes_away_ends(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": 5000}, strategy={"name": "single"})
    process = begin("train", path)
    assert process.stdout is not None
    with bounded(process):
        while not (line := process.stdout.readline()).startswith("step 2/"):
            assert line, "it ended too early, or hung"
        process.stdout.close()
        _, said = process.communicate(timeout=100)
    assert process.returncode != 0 and "Traceback" not in said
    of_run = str(tmp_path).encode()
    until(
        lambda: not running(lambda entry: of_run in (entry / "cmdline").read_bytes()),
        "the end of its processes",
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, the run file that made it, and the run of an adapter for it."""
    folder = tmp_path_factory.mktemp("tuned")
    whole = {"adapter": None, "strategy": {"name": "single"}, "train": {"steps": 1}}
    base = trained_here(run_file(folder, name="base", **whole)).folder / "model"
    trained_here(run_file(folder, **{**whole, "adapter": {"r": 4}, "model": {"name": str(base)}}))
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "generate out/tiny --prompt hello --max-new-tokens 2 --backend cpu",
        pytest.param("merge out/tiny --output merged", marks=pytest.mark.slow),
        pytest.param("plan tiny.yaml", marks=pytest.mark.slow),
    ],
)
def test_what_libraries_print_is_not_among_what_a_command_prints(line: str, tuned: Path) -> None:
    # A process of its own, to its very end: libraries' last words come when it is taken down.
    command = [sys.executable, "-m", "anygauge.cli", *line.split()]
    done = subprocess.run(command, cwd=tuned, capture_output=True, text=True, timeout=120)
    empty = f"{EMPTY_ANSWER}\n" if line.startswith("generate") and not done.stdout.strip() else ""
    assert (done.returncode, done.stderr) == (0, empty)
    assert "leaked" not in done.stdout
