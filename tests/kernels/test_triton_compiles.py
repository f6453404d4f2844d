"""Triton's compiler takes every kernel, for GPUs that are not here; nothing spills to memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SPILLED_AT_MOST = {80: 96, 90: 96, 100: 112, 120: 384}
"""Capability -> bytes of a thread; the longest rows take all the registers that there are.
Cards of 12.0 have the fewest: with a mask they spill (triton 3.9; at most 84 bytes with 3.6)."""


@pytest.mark.parametrize(
    ("capability", "which"),
    [
        (90, "largest"),
        pytest.param(90, "all", marks=pytest.mark.slow),
        pytest.param(80, "all", marks=pytest.mark.slow),
        pytest.param(100, "all", marks=pytest.mark.slow),
        pytest.param(120, "all", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_and_fits_its_registers(
    capability: int, which: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", str(capability), which],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == {
        "_forward_rows",
        "_forward_long",
        "_backward_rows",
        "_backward_long",
        "_rows",
    }
    for each in compiled:
        assert each["spilled"] <= SPILLED_AT_MOST[capability], each
