"""The loop of one's own runs unchanged on devices of each kind."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "own_loop.py"
TIMEOUT_S = 300.0


def needs(backend: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(f"anygauge_{backend}") is None
    return pytest.mark.skipif(missing, reason=f"{backend} is not installed (make plugins)")


CPU, SIM, LAZY = (pytest.param(name, marks=needs(name)) for name in ("cpu", "sim", "lazy"))


def start(*arguments: str, **environment: object) -> subprocess.Popen[str]:
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ANYGAUGE_SIM_LOCKS": "", **given},
    )


def losses(process: subprocess.Popen[str]) -> list[float]:
    printed, complaint = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, complaint
    return [float(line.split()[-1]) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def host() -> list[float]:
    """The losses on the host."""
    return losses(start("cpu"))


def test_one_process_learns(host: list[float]) -> None:
    assert host[-1] < host[0] / 2


@pytest.mark.parametrize("backend", [SIM, LAZY])
def test_one_process_learns_as_on_the_host(backend: str, host: list[float]) -> None:
    assert losses(start(backend)) == pytest.approx(host, rel=1e-3)


@pytest.mark.parametrize("backend", [CPU, SIM])
def test_autocast_is_asked_of_the_device(backend: str) -> None:
    found = losses(start(backend, "bfloat16"))
    assert found[-1] < found[0] / 2


@needs("lazy")
def test_autocast_that_a_device_has_not_got_is_refused() -> None:
    _, complaint = start("lazy", "bfloat16").communicate(timeout=TIMEOUT_S)
    assert "UnsupportedError: autocast to torch.bfloat16: torch.autocast has no list" in complaint


@pytest.mark.parametrize("backend", [CPU, SIM])
def test_ranks_learn_together(backend: str, tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": 2, "MEET": tmp_path / "meet", "ANYGAUGE_SIM_CARDS": 2}
    ranks = [start(backend, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(2)]
    one, other = map(losses, ranks)
    assert one == other, "the mean of both"
    assert one[-1] < one[0] / 2
