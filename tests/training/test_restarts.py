"""A rank is killed, and the run resumes by itself from the newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers.processes import until
from tests.helpers.runs import run_file

STEPS = 30


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    path = run_file(
        tmp_path,
        strategy={"name": "zero"},
        train={"steps": STEPS},
        checkpoint={"every": 5},
        launch={"devices": 2, "max_restarts": 1},
    )
    run = tmp_path / "out" / "tiny"
    process = subprocess.Popen(
        [sys.executable, "-m", "anygauge.cli", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until((run / "checkpoints" / "step-00000005").exists, "a checkpoint")
    log = (run / "logs" / "supervisor.log").read_text()
    pid = int(log.partition("rank 1 started, process ")[2].split()[0])
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}"
    assert "rank 1 on" in out and "was killed (signal 9, SIGKILL)" in out
    assert "starting again from the newest checkpoint (restart 1 of 1, launch.max_restarts)" in out
    assert "resumed: " in out
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, STEPS + 1))
