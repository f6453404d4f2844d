"""Runs that hang end within `launch.collective_timeout_s` and the grace time; slow ones go on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.child_processes import alive, begin, end, until
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import run_file

LIMIT_S, GRACE_S = 8.0, 5.0
SLOW_S = 12.0
SLACK_S = 30.0
"""For a machine that does other work; torch's own limit is 1800."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "stopped"),
    [
        ({"name": "zero", "stage": 1}, 0),
        ({"name": "zero", "stage": 2}, 1),
        ({"name": "zero", "stage": 3}, 1),
        ({"name": "single"}, 0),
    ],
    ids=["zero-1", "zero-2", "zero-3", "single"],
)
def test_a_rank_that_is_stopped_ends_the_run(
    tmp_path: Path, strategy: dict[str, Any], stopped: int
) -> None:
    ranks = 1 if strategy["name"] == "single" else 2
    path = run_file(
        tmp_path,
        strategy=strategy,
        launch={"devices": ranks, "collective_timeout_s": LIMIT_S, "options": {"grace_s": GRACE_S}},
        train={"steps": 1_000_000, "log_every": 1_000_000},
    )
    folder = tmp_path / "out" / "tiny"
    metrics = folder / "metrics.jsonl"
    command = begin("train", path, stdout=subprocess.DEVNULL)
    try:
        until(lambda: metrics.exists() and metrics.stat().st_size, "a step")
        log = (folder / "logs" / "supervisor.log").read_text()
        pids = [int(pid) for pid in re.findall(r"rank \d+ started, process (\d+)", log)]
        os.kill(pids[stopped], signal.SIGSTOP)
        _, errors = command.communicate(timeout=LIMIT_S + GRACE_S + SLACK_S)
    finally:
        end(command)
    assert command.returncode == 1
    for rank in range(ranks):
        assert re.search(rf"^rank {rank}: (start-up|step \d+, )", errors, re.MULTILINE), errors
    assert re.search(rf"^rank {stopped}: .*; stopped \(state T in /proc\)$", errors, re.MULTILINE)
    assert not any(alive(pid) for pid in pids)


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "0":
            print(f"slow: {function.__name__}", flush=True)
            time.sleep(SLOW_S)
        return function(*args, **options)

    return slowly


def slow_once_real(adapt: Callable[..., Any]) -> Callable[..., Any]:
    """Slow for the model itself, not for those without weights that are only looked at."""
    slowly = slow(adapt)

    def adapting(self: Any, model: Any) -> Any:
        on_meta = any(p.is_meta for p in model.parameters())
        return (adapt if on_meta else slowly)(self, model)

    return adapting


@contextlib.contextmanager
def slow_rank_0() -> Iterator[None]:
    """Rank 0 alone is slow: while it loads, writes a checkpoint, and saves."""
    from anygauge.models.factory import CausalModelFactory
    from anygauge.training import save, setup
    from anygauge.training.checkpoints import manager

    with (
        mock.patch.object(setup, "prepare", slow(setup.prepare)),
        mock.patch.object(CausalModelFactory, "adapt", slow_once_real(CausalModelFactory.adapt)),
        mock.patch.object(manager, "write_checkpoint", slow(manager.write_checkpoint)),
        mock.patch.object(save, "save_adapter", slow(save.save_adapter)),
    ):
        yield


@pytest.mark.parametrize("stage", [2, 3])
def test_a_slow_load_and_a_slow_save_survive(tmp_path: Path, stage: int) -> None:
    path = run_file(
        tmp_path,
        strategy={"name": "zero", "stage": stage},
        launch={"devices": 2, "collective_timeout_s": LIMIT_S},
        checkpoint={"every": 2},
    )
    assert SLOW_S > LIMIT_S
    (run,) = finished([RunPart(file=str(path))], within=slow_rank_0)
    for what in ("prepare", "adapt", "write_checkpoint", "save_adapter"):
        assert f"slow: {what}" in (run.folder / "rank0.log").read_text()
    assert len(run.steps("loss")) == 4
    assert (run.folder / "adapter" / "adapter_config.json").exists()
