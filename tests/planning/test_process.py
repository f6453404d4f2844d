"""The process that plans: there before it is asked, asked in order, gone when nobody has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, ModelError
from anygauge.planning import process
from anygauge.planning.plan import plan_run
from anygauge.planning.process import Planner, TooLongError, planner_for
from anygauge.registry import Registry
from tests.helpers.processes import alive
from tests.helpers.runs import run_file


def test_it_ends_with_what_started_it() -> None:
    kept, dropped = Planner(), Planner()
    pids = [one._process.pid for one in (kept, dropped)]
    assert all(map(alive, pids))
    kept.end()
    del dropped
    assert not any(map(alive, pids))


def test_the_one_that_was_started_ahead_is_taken_unless_a_run_has_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    class Standin:
        def __init__(self, environment: Any = None) -> None:
            self.environment = environment
            self.end = lambda: ended.append(id(self))

    monkeypatch.setattr(process, "Planner", Standin)
    process.start_planner()
    first = process._started[0]
    assert planner_for({}) is first and not process._started
    process.start_planner()
    second = process._started[0]
    assert planner_for({"HF_HOME": "/models"}).environment == {"HF_HOME": "/models"}  # type: ignore[attr-defined]
    assert ended == [id(second)]


def test_it_is_started_before_anything_heavy_is_imported() -> None:
    heavy = ("pydantic", "numpy", "torch", "anygauge.registry")
    script = (
        "import sys, anygauge.planning.process; "
        f"assert not {{*{heavy}}} & {{*sys.modules}}, sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.slow
def test_it_answers_as_the_function_does_in_the_order_of_its_questions(tmp_path: Path) -> None:
    def run(length: int) -> RunFile:
        path = run_file(tmp_path, strategy={"name": "single"}, data={"max_length": length})
        return load_run_file(path).run

    registry = Registry.load()
    here = {n: plan_run(run(n), registry, registry.create_backend("cpu"), 1) for n in (64, 128)}
    with Planner() as planner:
        planner.ask(run(64), "cpu", 1)  # nobody waits for it
        assert planner.plan(run(128), "cpu", 1) == here[128]
        with pytest.raises(ModelError, match="was made for 256 positions"):
            planner.plan(run(512), "cpu", 1)
        with pytest.raises(TooLongError, match="within 0 s; plan with fewer layers"):
            planner.plan(run(64), "cpu", 1, limit_s=0.0)
        assert planner.plan(run(64), "cpu", 1) == here[64]
        planner._process.kill()
        planner._process.wait()
        with pytest.raises(AnygaugeError, match=r"plans ended with signal 9, SIGKILL.* too little"):
            planner.plan(run(128), "cpu", 1)
