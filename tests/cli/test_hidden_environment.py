"""What the run file's ``environment`` holds is neither shown nor readable by others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anygauge.cli import dry_run, run
from anygauge.config.load import load_run_file
from anygauge.interface import AnygaugeError, RunFileError
from anygauge.launch.rank_environment import NodeEnvironment, write_provenance
from anygauge.launch.run_directory import write_run
from anygauge.launch.startup import place_run_file
from anygauge.util.files import write_text
from tests.helpers.jobs import make_job
from tests.helpers.runs import check_here, run_file

VALUE = "hush-hush-hush"
ADDRESS = f"http://ann:{VALUE}@proxy:3128"
VARIABLES = {
    **{"GITHUB_PAT": VALUE, "MYSQL_PWD": VALUE, "SAS": VALUE, "HTTPS_PROXY": ADDRESS},
    **{"HARMLESS": VALUE, "OMP_NUM_THREADS": "3"},
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return run_file(tmp_path, environment=VARIABLES)


@pytest.mark.parametrize("form", ["table", "shell", "json"])
def test_env_hides_what_the_run_file_sets(
    path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", str(path), "--format", form]) == 0
    shown = capsys.readouterr().out
    assert VALUE not in shown.replace("\n", "") and "GITHUB_PAT" in shown
    assert run(["env", str(path), "--format", form, "--show-values"]) == 0
    asked = capsys.readouterr().out
    assert VALUE in asked.replace("\n", ""), "of HARMLESS, which was asked for"
    for line in asked.splitlines():
        name = line.split("=")[0]
        assert form != "shell" or VALUE not in line or name == "export HARMLESS", line


def test_a_dry_run_hides_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("_show_engine", "_show_kernels"):  # neither is about variables, both are slow
        monkeypatch.setattr(dry_run, part, lambda *_: None)
    check_here(monkeypatch)
    assert run(["train", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "GITHUB_PAT" in shown and VALUE not in shown


def test_what_is_recorded_hides_it_and_is_for_its_owner(path: Path, tmp_path: Path) -> None:
    loaded = load_run_file(path)
    job = make_job(
        run_directory=tmp_path, environment=loaded.environment, run_text="environment: ..."
    )
    record = tmp_path / "environment-node0.json"
    for known in (record, Path(job.run_file)):
        known.write_text("of an earlier part of the run")
        known.chmod(0o644)
    write_provenance(job, 0, NodeEnvironment(job, 0, os.environ).record())
    place_run_file(job)
    assert VALUE not in record.read_text()
    assert {s["name"] for s in json.loads(record.read_text())["0"]} >= set(VARIABLES)
    assert record.stat().st_mode & 0o777 == 0o600
    assert Path(job.run_file).stat().st_mode & 0o777 == 0o600
    write_run(tmp_path / "start" / "resolved", loaded)
    written = [path.stat().st_mode & 0o777 for path in (tmp_path / "start").iterdir()]
    assert written == [0o600, 0o600]


def test_a_leftover_does_not_lend_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    left = tmp_path / f".run.yaml.here.{os.getpid()}.tmp"
    left.write_text("half")
    left.chmod(0o644)
    write_text(tmp_path / "run.yaml", "whole", 0o600)
    assert (tmp_path / "run.yaml").stat().st_mode & 0o777 == 0o600


def test_a_secret_of_the_wrong_type_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, environment={"HF_TOKEN": 123456789})
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    assert "environment.HF_TOKEN: got a value of type int (not shown)" in str(caught.value)
    assert "123456789" not in str(caught.value)
    with pytest.raises(RunFileError) as caught:
        load_run_file(run_file(tmp_path), ["environment.HF_TOKEN=123456789"])
    assert "--set environment.HF_TOKEN=(hidden)" in str(caught.value)
    assert "123456789" not in str(caught.value)


def test_an_address_is_quoted_without_its_password(tmp_path: Path) -> None:
    from anygauge.data import peek
    from anygauge.data.remote_files import describe_address

    address = f"nowhere://ann:{VALUE}@hub.example/rows.jsonl?sig={VALUE}"
    run = load_run_file(run_file(tmp_path, data={"train": {"path": address}}))
    with pytest.raises(AnygaugeError) as caught:
        peek(run.data, run.train)
    assert "(hidden)@hub.example/rows.jsonl" in str(caught.value)
    assert VALUE not in str(caught.value)
    assert describe_address(address) == "nowhere://(hidden)@hub.example/rows.jsonl"
