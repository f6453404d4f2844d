"""A job file: what is in it, what is not, and how a bad one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anygauge.interface import AnygaugeError, Job, LaunchSettings
from tests.helpers.jobs import make_job

JOB = make_job(
    name="t",
    run_directory="/r",
    run_file="/r/run.yaml",
    backend="x",
    strategy="single",
    rendezvous="file:///r/meet",
    nodes=2,
    devices=4,
    port=4711,
    pass_environment=("HF_HOME",),
    environment={"A": "1"},
)


def test_a_job_file_brings_the_job_back(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(JOB.dump())
    assert Job.load(path) == JOB
    assert JOB.world_size == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps({"name": "t"}),
        json.dumps({**json.loads(JOB.dump()), "launch": 2}),
        json.dumps({**json.loads(JOB.dump()), "nodes": 2}),
        json.dumps({**json.loads(JOB.dump()), "launch": {"pass_environment": [], "ports": 1}}),
    ],
)
def test_what_is_not_a_job_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(AnygaugeError, match=r"job\.json is not a job file of this anygauge"):
        Job.load(path)


def test_a_machine_is_not_lost_later_than_two_hanging_collectives() -> None:
    assert LaunchSettings(collective_timeout_s=5.0, lost_after_s=60.0).silence_s == 10.0
    assert LaunchSettings(lost_after_s=60.0).silence_s == 60.0
