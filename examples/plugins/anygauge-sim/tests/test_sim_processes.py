"""What takes processes of its own: collectives, locks, visible cards."""

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
