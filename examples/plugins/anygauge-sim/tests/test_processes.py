"""What takes processes of its own: collectives, locks, settings, faults, names, the exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOAD = "import torch; from anygauge_sim.device import load; sim = load(); "


def start(code: str, **environment: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )


def run(code: str, **environment: object) -> tuple[int, str]:
    process = start(code, **environment)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def ranks(size: int, folder: Path, **environment: object) -> list[tuple[int, str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "collective_rank.py"), f"file://{folder}/meet"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "ANYGAUGE_SIM_CARDS": str(size),
                "OMP_NUM_THREADS": "1",
                **{name: str(value) for name, value in environment.items()},
            },
        )
        for rank in range(size)
    ]
    return [
        (p.returncode, out) for p, (out, _) in ((p, p.communicate(timeout=300)) for p in processes)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(size: int, tmp_path: Path) -> None:
    for status, out in ranks(size, tmp_path):
        assert status == 0, out
        assert "all right" in out


def test_a_collective_that_fails_on_purpose(tmp_path: Path) -> None:
    for status, out in ranks(2, tmp_path, ANYGAUGE_SIM_FAULTS="fail:broadcast@1"):
        assert status == 1
        assert "simccl broadcast: the link failed" in out


def test_a_card_serves_one_process(tmp_path: Path) -> None:
    hold = start(
        LOAD + "t = torch.ones(1, device='sim'); print('held', flush=True); input()",
        ANYGAUGE_SIM_LOCKS=tmp_path,
    )
    assert hold.stdout is not None and hold.stdin is not None
    assert hold.stdout.readline().strip() == "held"
    try:
        status, out = run(LOAD + "torch.ones(1, device='sim')", ANYGAUGE_SIM_LOCKS=tmp_path)
        assert status == 1 and "card 0 is busy" in out
        status, out = run(LOAD + "torch.ones(1, device='sim:1')", ANYGAUGE_SIM_LOCKS=tmp_path)
        assert status == 0, out
    finally:
        hold.stdin.close()
        hold.wait(timeout=60)
    status, out = run(LOAD + "torch.ones(1, device='sim')", ANYGAUGE_SIM_LOCKS=tmp_path)
    assert status == 0, out


def test_visible_cards_are_numbered_anew() -> None:
    status, out = run(
        LOAD + "print(sim.device_count(), sim.get_device_name(1))",
        ANYGAUGE_SIM_CARDS=4,
        ANYGAUGE_SIM_VISIBLE_CARDS="1,3",
    )
    assert (status, out.split("\n")[-2]) == (0, "2 simulated card 3")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ANYGAUGE_SIM_CARDS", "many", "'many' is no positive whole number"),
        ("ANYGAUGE_SIM_VISIBLE_CARDS", "0,9", "'9' is no card of 0 to 1"),
        ("ANYGAUGE_SIM_FAULTS", "often", "'often' is none of oom@N"),
    ],
)
def test_wrong_settings_are_named(variable: str, value: str, said: str) -> None:
    status, out = run(LOAD + "torch.ones(1, device='sim')", **{variable: value})
    assert status == 1
    assert variable in out and said in out


def test_the_nth_allocation_is_refused() -> None:
    status, out = run(
        LOAD + "a = torch.empty(4, device='sim')\n"
        "try: torch.empty(4, device='sim')\n"
        "except torch.OutOfMemoryError as error: print('refused', error)\n"
        "torch.empty(4, device='sim')",
        ANYGAUGE_SIM_FAULTS="oom@2",
    )
    assert status == 0, out
    assert "refused sim card 0 is out of memory" in out and "on purpose" in out


def test_a_trace_has_a_line_per_operation(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    status, out = run(LOAD + "torch.ones(2, device='sim').exp()", ANYGAUGE_SIM_TRACE=path)
    assert status == 0, out
    assert path.read_text().splitlines() == ["0 aten::fill_", "0 aten::exp"]


def test_it_can_bear_another_name() -> None:
    status, out = run(
        "import torch; from anygauge_sim.device import load; load('hpu'); "
        "t = torch.ones(3, device='hpu', requires_grad=True); (t * 2).sum().backward(); "
        "print(t.grad.device, t.grad.tolist())"
    )
    assert (status, out.splitlines()[-1]) == (0, "hpu:0 [2.0, 2.0, 2.0]")


def test_a_process_that_trained_ends_without_an_abort() -> None:
    code = LOAD + (
        "w = torch.ones(64, 64, device='sim', requires_grad=True)\n"
        "for _ in range(3): (w @ w).sum().backward()\n"
    )
    processes = [start(code) for _ in range(6)]
    assert [p.wait(timeout=300) for p in processes] == [0] * 6
