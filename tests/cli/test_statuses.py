"""Help of every command, and statuses of jobs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from anygauge import cli


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["anygauge", *arguments])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_one_style(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([name, "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    words = r"[A-Za-z._]+|\[RUN\.yaml\]"
    assert re.fullmatch(
        rf"Usage: anygauge {name}( ({words}))* \[OPTIONS\]( \[-- COMMAND \.{{3}}\])?", usage
    )
    assert "  -h, --help" in "\n".join(lines) and not any("bool" in line for line in lines)
    assert max(map(len, [*lines, *cli.help_text().splitlines()])) <= 80


SCONTROL = {
    "running": 'echo "JobId=42 JobState=RUNNING Reason=None"',
    "gone": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "away": "echo 'no contact' >&2; exit 1",
}


@pytest.mark.parametrize(
    ("answer", "event", "status", "said"),
    [
        ("running", None, 0, "slurm job 42: running\n"),
        ("gone", None, 1, "slurm job 42: Slurm does not know it (any more)\n"),
        ("gone", {"event": "ended", "state": "ok"}, 0, "slurm job 42: ended (ok); Slurm has "),
        ("gone", {"event": "message", "text": "began"}, 1, "slurm job 42: Slurm does not know"),
        ("away", None, 1, "slurm job 42: unreachable (no contact)\n"),
    ],
)
def test_the_status_of_a_job_that_is_gone(
    answer: str,
    event: dict[str, str] | None,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{SCONTROL[answer]}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    record = {"launcher": "slurm", "record": {"job": "42", "offset": 0}}
    (tmp_path / "launched.json").write_text(json.dumps(record))
    if event is not None:
        (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert ended(["job", "status", str(tmp_path)], monkeypatch) == status
    shown = capsys.readouterr()
    assert shown.out.startswith(said)
    assert ("no agent reported how the job ended" in shown.err) == ("does not know" in said)
