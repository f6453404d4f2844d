"""The steps of a calibration: runs like any other, and their work is what a plan says of it."""

from __future__ import annotations

import json

import pytest

from anygauge.agent import local_job
from anygauge.config.resolved import parse_run
from anygauge.planning.calibration import practice
from anygauge.planning.planner import Planner
from anygauge.planning.work import Work
from anygauge.registry import Registry
from tests.planning.practice_rank import MODULE


def test_runs_are_of_each_type_and_differ() -> None:
    registry = Registry.load()
    alone = list(practice(registry, ["bfloat16", "float32"], 1))
    assert {run.strategy.name for run in alone} == {"single"}
    assert {run.precision.param_dtype for run in alone} == {"bfloat16", "float32"}
    together = list(practice(registry, ["bfloat16", "float32"], 2))
    assert {run.strategy.name for run in together} == {"ddp", "zero", "fsdp"}
    assert {run.launch.devices for run in together} == {2}
    names = [run.model_dump_json() for run in (*alone, *together)]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_their_work_is_what_a_plan_says() -> None:
    found = local_job.run(MODULE, "practice", "cpu", {}, 2, 300)["found"]
    assert {json.loads(one["run"])["strategy"]["name"] for one in found} == {"ddp", "zero", "fsdp"}
    with Planner(2) as planner:
        for one in found:
            run = parse_run(one["run"])
            planned, real = planner.rehearse(run, "cpu").work, Work.of_record(one["work"])
            assert planned.flops == pytest.approx(real.flops, rel=0.01)
            assert planned.other_bytes == pytest.approx(real.other_bytes, rel=0.3)
            assert planned.operations == pytest.approx(real.operations, rel=0.3)
            assert planned.given == pytest.approx(real.given, rel=0.05), run.strategy
            assert one["seconds"] > 0
