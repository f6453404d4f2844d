"""The loop of one's own runs unchanged on devices of each kind."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.zygote import ROOT, Fork, run_forks

SCRIPT = "examples.own_loop"
TIMEOUT_S = 300.0


def needs(backend: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(f"anygauge_{backend}") is None
    return pytest.mark.skipif(missing, reason=f"{backend} is not installed (make plugins)")


CPU, SIM, LAZY = (pytest.param(name, marks=needs(name)) for name in ("cpu", "sim", "lazy"))


def ended(folder: Path, *arguments: str, world: int = 1) -> list[tuple[int, str]]:
    """Exit status and output of each rank: forks, which have imported torch."""
    shared = {"WORLD_SIZE": world, "MEET": folder / "meet"}
    cards = {"ANYGAUGE_SIM_CARDS": 2, "ANYGAUGE_SIM_LOCKS": ""}
    forks = []
    for rank in range(world):
        given = {"RANK": rank, "LOCAL_RANK": rank, **shared, **cards}
        environment = {name: str(value) for name, value in given.items()}
        log = str(folder / f"rank{rank}.log")
        forks.append(Fork(module=SCRIPT, arguments=arguments, log=log, environment=environment))
    codes = run_forks(forks, timeout_s=TIMEOUT_S)
    return [(code, Path(fork.log).read_text()) for code, fork in zip(codes, forks, strict=True)]


def losses_in(printed: str) -> list[float]:
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]


def losses(folder: Path, *arguments: str, world: int = 1) -> list[list[float]]:
    """Of each rank, which must end well."""
    ranks = ended(folder, *arguments, world=world)
    assert not any(code for code, _ in ranks), ranks
    return [losses_in(printed) for _, printed in ranks]


@pytest.fixture(scope="module")
def host() -> list[float]:
    """The losses on the host, of a process as a user starts it."""
    script = ROOT / "examples/own_loop.py"
    done = subprocess.run([sys.executable, script, "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def test_one_process_learns(host: list[float]) -> None:
    assert host[-1] < host[0] / 2


@pytest.mark.parametrize("backend", [SIM, LAZY])
def test_one_process_learns_as_on_the_host(backend: str, host: list[float], tmp_path: Path) -> None:
    (found,) = losses(tmp_path, backend)
    assert found == pytest.approx(host, rel=1e-3)


@pytest.mark.parametrize("backend", [CPU, SIM])
def test_autocast_is_asked_of_the_device(backend: str, tmp_path: Path) -> None:
    (found,) = losses(tmp_path, backend, "bfloat16")
    assert found[-1] < found[0] / 2


@needs("lazy")
def test_autocast_that_a_device_has_not_got_is_refused(tmp_path: Path) -> None:
    ((code, complaint),) = ended(tmp_path, "lazy", "bfloat16")
    assert code != 0
    assert "UnsupportedError: autocast to torch.bfloat16: torch.autocast has no list" in complaint


@pytest.mark.parametrize("backend", [CPU, SIM])
def test_ranks_learn_together(backend: str, tmp_path: Path) -> None:
    one, other = losses(tmp_path, backend, world=2)
    assert one == other, "the mean of both"
    assert one[-1] < one[0] / 2
