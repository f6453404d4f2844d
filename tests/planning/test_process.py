"""The process that plans beside a run's checks: it answers as the function does, and is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, ModelError
from anygauge.planning.process import Planner, TooLongError
from anygauge.planning.trials import Target, Trials
from anygauge.registry import Registry
from tests.helpers.processes import alive
from tests.helpers.runs import run_file

TARGET = Target(backend="cpu", card=None)


def run(folder: Path, **changes: Any) -> RunFile:
    path = run_file(folder, **{"strategy": {"name": "single"}, **changes})
    return load_run_file(path).run


def test_it_ends_with_what_started_it(tmp_path: Path) -> None:
    with Planner((run(tmp_path),), TARGET, {}) as planner:
        assert alive(planner._process.pid)
        with pytest.raises(TooLongError, match="within 0 s"):
            planner.trial(0)
    assert not alive(planner._process.pid)


@pytest.mark.slow
def test_it_answers_as_the_function_does(tmp_path: Path) -> None:
    long = run(tmp_path, data={"max_length": 512})
    here = Trials(Registry.load()).first_that_fits([long, run(tmp_path)], TARGET)
    with Planner((long, run(tmp_path)), TARGET, {}) as planner:
        there = planner.trial(120)
    assert (there.run, there.memory, there.fit) == (here.run, here.memory, here.fit)
    ((passed, error),) = there.passed_over
    assert passed == long and "was made for 256 positions" in str(error)
    with (
        Planner((long,), TARGET, {}) as planner,
        pytest.raises(ModelError, match="was made for 256 positions"),
    ):
        planner.trial(120)


def test_one_that_is_killed_is_told(tmp_path: Path) -> None:
    with Planner((run(tmp_path),), TARGET, {}) as planner:
        os.kill(planner._process.pid, signal.SIGKILL)
        with pytest.raises(AnygaugeError, match=r"plans ended with signal 9, SIGKILL.* too little"):
            planner.trial(60)
