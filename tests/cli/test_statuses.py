"""Exit statuses: 2 for whatever is wrong in a command line, and what `job status` ends with."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from anygauge import cli
from tests.helpers.runs import run_file

# Each must end with 2, before it starts or writes anything. RUN is a sound run file.
WRONG = [
    *("nonsense", "trian RUN", "train", "train RUN more", "train RUN --nonsense"),
    *("train RUN --backend gpu", "train RUN --launcher slrum", "train RUN --devices 0"),
    *("train RUN --devices many", "train RUN --nodes 2", "train RUN --set train.stepz=1"),
    *("train RUN --set strategy.name=zerro", "train RUN --set strategy.stage=9"),
    *("train RUN --set trackers=[nothing]", "train missing.yaml", "train RUN --resume missing"),
    *("launch RUN --detach", "launch RUN --render .", "launch RUN --backend nvidia"),
    *("job status missing", "job status .", "job logs .", "job begin .", "job status"),
    *("data missing.yaml", "data RUN --backend amd", "data RUN --rows many"),
    *("data RUN --set data.train.prompt=qestion", "data RUN --set data.train.path=empty.jsonl"),
    "data RUN --set data.max_length=4 --set data.too_long=drop --set data.cache=off",
    "data RUN --set data.train.path=blank.jsonl --set data.cache=off",
    "train RUN --backend cpu --set adapter.targets=[q_porj] --set data.cache=off",
    *("generate", "generate ./missing --prompt a", "generate RUN --temperature -1"),
    *("merge ./missing --output new", "merge model", "merge model --output ."),
    *("env --backend apple", "env --local-rank 7 --backend cpu", "env --format xml"),
    *("env --set a=1", "doctor --backend gpu", "doctor --collectives 1", "image --backend gpu"),
    *("image --engine dokcer", "image --backend cpu --release none", "launchers --nonsense"),
    *("strategies --backend cpuu", "strategies fsdp"),
    *("plan missing.yaml", "plan RUN --machine h1000:8", "plan RUN --machine h100:0"),
    *("plan RUN --set model.path=./missing", "plan RUN --hardware missing.toml", "plan"),
    *("plan RUN --compare h1000:8", "plan RUN --largest rows"),
    *("backends --nonsense", "kernels --backend gpu", "kernels --nonsense"),
]


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["anygauge", *arguments])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_in_a_command_line_ends_with_2(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_file(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"prompt": "a", "completion": " "}\n')
    monkeypatch.chdir(tmp_path)
    words = [str(run) if word == "RUN" else word for word in line.split()]
    before = sorted(tmp_path.rglob("*"))
    assert ended(words, monkeypatch) == 2
    shown = capsys.readouterr()
    assert shown.err and "Traceback" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before


def test_every_command_has_a_wrong_line() -> None:
    assert set(cli.COMMANDS) <= {line.split()[0] for line in WRONG}


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


@pytest.mark.parametrize("name", ["gpu", "nvidia", "amd", "apple"])
def test_a_word_for_devices_gets_the_list_of_backends(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["doctor", "--backend", name], monkeypatch) == 2
    shown = capsys.readouterr().err
    assert "did you mean" not in shown
    assert "  cpu: this machine's processors; available here\n" in shown
    assert "  hpu: Intel Gaudi cards; " in shown and "  cuda: NVIDIA GPUs; " in shown


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
