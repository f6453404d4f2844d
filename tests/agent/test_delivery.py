"""A job that was brought along: its run file is put in place, and nobody's run is written over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anygauge.agent.delivery import OWNER, bring_run_file, claim, read_secrets
from anygauge.config import RunFile, load_run_file, run_json
from anygauge.interface import AnygaugeError, Job
from anygauge.util.start import START, put_in_place, settled


def text(name: str) -> str:
    run = {"name": name, "model": {"name": "org/m"}, "data": {"train": {"path": "/rows.jsonl"}}}
    return run_json(RunFile.model_validate(run))


OURS, OTHER = text("ours"), text("other")


def job(folder: Path, **fields: Any) -> Job:
    return Job(
        **{
            "name": "t", "run_directory": str(folder / "run"), "backend": "x", "strategy": "zero",
            "run_file": str(folder / "run" / "run.json"), "rendezvous": "file:///x",
            "token": "one", "run_text": OURS, **fields,
        }
    )  # fmt: skip


def test_the_head_claims_and_every_machine_has_the_run_file(tmp_path: Path) -> None:
    claim(job(tmp_path), 1)
    assert list((tmp_path / "run").iterdir()) == []
    claim(job(tmp_path), 0)
    assert (tmp_path / "run" / "run.json").read_text() == OURS
    assert load_run_file(tmp_path / "run" / "run.yaml").run.name == "ours", "for people, too"
    mark = (tmp_path / "run" / OWNER).read_text()
    assert len(mark.strip()) == 64 and "one" not in mark
    # Where the storage is not shared, the others bring their own.
    (tmp_path / "run" / "run.json").unlink()
    bring_run_file(job(tmp_path))
    assert (tmp_path / "run" / "run.json").read_text() == OURS


def test_no_machine_writes_over_another_jobs_run_file(tmp_path: Path) -> None:
    claim(job(tmp_path, run_text=OTHER), 0)
    for node_rank in (0, 1):
        with pytest.raises(AnygaugeError, match="holds another job's run"):
            claim(job(tmp_path), node_rank)
    assert (tmp_path / "run" / "run.json").read_text() == OTHER


def test_another_attempt_of_the_same_job_goes_on(tmp_path: Path) -> None:
    claim(job(tmp_path), 0)
    (tmp_path / "run" / "metrics.jsonl").touch()
    claim(job(tmp_path), 0)


@pytest.mark.parametrize("left", ["claim", "metrics.jsonl", "checkpoints"])
def test_the_run_of_another_job_is_not_written_over(tmp_path: Path, left: str) -> None:
    if left == "claim":
        claim(job(tmp_path, token="other"), 0)
    else:
        (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(AnygaugeError, match="holds another job's run: give this one another"):
        claim(job(tmp_path), 0)
    claim(job(tmp_path, takes_over=True), 0)  # --resume auto
    claim(job(tmp_path), 0)  # it is its own now


def test_what_another_job_has_left_stays_until_the_ranks_accept(tmp_path: Path) -> None:
    home = tmp_path / "run"
    claim(job(tmp_path, token="other", run_text=OTHER), 0)
    new = job(tmp_path, takes_over=True, run_file=str(home / START / "run.json"))
    for node_rank in (1, 0, 1):
        claim(new, node_rank)
        assert new.start_directory == home / START, "logs of every machine go there"
    bring_run_file(new)
    claim(new, 0)  # the cluster starts it again before they do
    assert (home / "run.json").read_text() == OTHER
    assert settled(Path(new.run_file)).read_text() == OURS
    put_in_place(new.start_directory, Path(new.run_directory))
    for node_rank in (1, 0):  # and afterwards
        claim(new, node_rank)
        bring_run_file(new)
        assert new.start_directory == home and not (home / START).exists()
    assert (home / "run.json").read_text() == OURS


def test_a_run_without_a_mark_is_left_likewise(tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    (home / "run.yaml").write_text("mine")
    claim(job(tmp_path, takes_over=True, run_file=str(home / START / "run.json")), 0)
    assert (home / "run.yaml").read_text() == "mine"
    assert (home / START / "run.json").read_text() == OURS


def test_where_nothing_was_before_nothing_waits(tmp_path: Path) -> None:
    home = tmp_path / "run"
    new = job(tmp_path, takes_over=True, run_file=str(home / START / "run.json"))
    for node_rank in (1, 0, 1):
        claim(new, node_rank)
        assert new.start_directory == home
    bring_run_file(new)
    assert sorted(path.name for path in home.iterdir()) == [OWNER, "run.json", "run.yaml"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(AnygaugeError, match=r"run cannot be written: .* storage that the job moun"):
        claim(job(tmp_path), 0)


def test_secrets_are_read_as_a_cluster_mounts_them(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "HF_TOKEN").write_text("hf $x\n雪")
    (tmp_path / "HF_TOKEN").symlink_to("..data/HF_TOKEN")
    assert read_secrets(str(tmp_path)) == {"HF_TOKEN": "hf $x\n雪"}
    with pytest.raises(AnygaugeError, match="is not a folder of secrets"):
        read_secrets(str(tmp_path / "nowhere"))
