"""No run file and no row gives a traceback, a hang, or takes all memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def tried(*arguments: str, timeout_s: float) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.generated.trial", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    return found


def test_a_few_broken_files_and_rows() -> None:
    # A busy machine is not a failure: the processor's time is what counts.
    found = tried("--files", "4", "--rows", "12", "--seed", "1", "--broken", timeout_s=400)
    assert found["cases"] == 16
    assert found["wrong"] == []
    assert {"0", "2"} <= found["rows"]["by status"].keys()


# In parts, since a test that takes twenty minutes is taken for one that hangs.
@pytest.mark.slow
@pytest.mark.parametrize("seed", ["2", "3", "4"])
def test_many_files_and_rows_and_steps_of_those_that_are_accepted(seed: str) -> None:
    found = tried("--files", "100", "--rows", "50", "--run", "7", "--seed", seed, timeout_s=1150)
    assert found["cases"] > 150
