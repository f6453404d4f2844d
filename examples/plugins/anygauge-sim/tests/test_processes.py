"""What takes processes of its own: collectives, locks, visible cards, traces, names, the exit."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import LOAD, ranks, run, start


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(size: int, tmp_path: Path) -> None:
    for status, out in ranks(size, tmp_path):
        assert status == 0, out
        assert "all right" in out


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


def test_a_closed_card_serves_others_once_its_last_tensor_is_gone(tmp_path: Path) -> None:
    first = start(
        "import torch; from anygauge_sim.backend import SimBackend\n"
        "backend, other = SimBackend(), SimBackend()\n"
        "t = torch.ones(1, device=backend.open()); other.open(); other.close(); del t\n"
        "print('one of two openings is closed', flush=True); input()\n"
        "t = torch.ones(1, device=backend.placement.device); backend.close()\n"
        "print('closed with a tensor alive', flush=True); input()\n"
        "del t\n"
        "print('the tensor is gone', flush=True); input()\n"
        "try: torch.ones(1, device='sim')\n"
        "except RuntimeError as error: print(error, flush=True)\n",
        ANYGAUGE_SIM_LOCKS=tmp_path,
    )
    assert first.stdout is not None and first.stdin is not None
    take = "from anygauge_sim.backend import SimBackend; SimBackend().open(); "
    try:
        for said in ("one of two openings is closed", "closed with a tensor alive"):
            assert first.stdout.readline().strip() == said
            status, out = run(take, ANYGAUGE_SIM_LOCKS=tmp_path)
            assert status == 1 and "card 0 is busy" in out, said
            print(file=first.stdin, flush=True)
        assert first.stdout.readline().strip() == "the tensor is gone"
        second = start(take + "print('held', flush=True); input()", ANYGAUGE_SIM_LOCKS=tmp_path)
        assert second.stdout is not None and second.stdin is not None
        try:
            assert second.stdout.readline().strip() == "held"
            print(file=first.stdin, flush=True)
            assert "card 0 is busy" in first.stdout.readline()
        finally:
            second.communicate(timeout=60)
    finally:
        first.communicate(timeout=60)


def test_visible_cards_are_numbered_anew() -> None:
    status, out = run(
        LOAD + "print(sim.device_count(), sim.get_device_name(1))",
        ANYGAUGE_SIM_CARDS=4,
        ANYGAUGE_SIM_VISIBLE_CARDS="1,3",
    )
    assert (status, out.split("\n")[-2]) == (0, "2 simulated card 3")


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
    processes = [start(code) for _ in range(3)]
    assert [p.wait(timeout=300) for p in processes] == [0] * 3
