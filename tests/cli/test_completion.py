"""Completion: what a shell is answered, and bash itself with the script that it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from anygauge.cli import COMMANDS, completion
from anygauge.cli.typed_so_far import run_files


def answers(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What the command answers bash about a line whose last word is to be completed."""
    monkeypatch.setenv("_ANYGAUGE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit) as ending:
        completion.complete([])
    assert ending.value.code == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("anygauge ", [*COMMANDS]),
        ("anygauge tra", ["train"]),
        ("anygauge train run.yaml --back", ["--backend"]),
        ("anygauge train run.yaml --backend cu", ["cuda"]),
        ("anygauge train run.yaml --launcher s", ["sagemaker", "slurm", "ssh"]),
        ("anygauge train run.yaml --set train.log_", ["train.log_every="]),
        ("anygauge plan run.yaml --set tracker_options.jsonl", ["tracker_options.jsonl.path="]),
        (
            "anygauge train run.yaml --set train.schedule.name=",
            [
                f"train.schedule.name={shape}"
                for shape in ("constant", "linear", "cosine", "warmup_stable_decay")
            ],
        ),
        (
            "anygauge train run.yaml --set adapter.dora=",
            ["adapter.dora=true", "adapter.dora=false"],
        ),
    ],
)  # fmt: skip
def test_words_that_a_line_may_have(
    line: str,
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answers(line, monkeypatch, capsys) == wanted


def test_run_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.yaml", "b.yml", "c.txt", "deep/er/d.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert run_files("") == ["a.yaml", "b.yml", "deep/"]
    assert run_files("a") == run_files("./a") == ["a.yaml"]
    # Behind a folder no space is to come.
    assert run_files("de") == ["deep/", "deep/er/", "deep/er/d.yaml"]
    assert run_files(f"{tmp_path}/b") == [f"{tmp_path}/b.yml"]
    assert run_files("missing/x") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_script() -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    scripts = sysconfig.get_path("scripts")
    environment["PATH"] = f"{scripts}:{environment['PATH']}"
    command = """
        source <(anygauge --show-completion bash)
        COMP_WORDS=(anygauge train run.yaml --set checkpoint.keep_l); COMP_CWORD=4
        $(complete -p anygauge | sed 's/.*-F \\([^ ]*\\) .*/\\1/') anygauge
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", command], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "checkpoint.keep_last=\n", done.stderr


def test_an_answer_needs_no_torch() -> None:
    source = (
        "import sys, atexit; from anygauge.cli import run; "
        "atexit.register(lambda: print([n for n in ('torch', 'datasets') if n in sys.modules])); "
        "run([])"
    )
    environment = {
        **os.environ,
        "_ANYGAUGE_COMPLETE": "complete_bash",
        "COMP_WORDS": "anygauge train run.yaml --set adapter.dor",
        "COMP_CWORD": "4",
    }
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["adapter.dora=", "[]"], done.stderr
