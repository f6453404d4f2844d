"""Faults on purpose: what fails, hangs, is refused or takes long, and by which name and count."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from anygauge_sim import _C
from children import LOAD, run

GROUP = LOAD + (
    "import time, datetime, torch.distributed as dist\n"
    "dist.init_process_group('simccl', store=dist.HashStore(), rank=0, world_size=1, "
    "timeout=datetime.timedelta(seconds=2))\n"
    "t, u = torch.ones(3, device='sim'), torch.ones(3, device='sim')\n"
)


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(t)",
        "dist.all_reduce(t, async_op=True).get_future().wait()",
        "with dist._coalescing_manager(device=t.device): dist.all_reduce(t); dist.all_reduce(u)",
    ],
    ids=["plain", "future", "coalesced"],
)
def test_a_hang_ends_by_the_groups_timeout(call: str) -> None:
    status, out = run(
        GROUP + "began = time.monotonic()\n"
        f"try:\n    {call}\n"
        "except dist.DistBackendError as error:\n    print('ended:', error)\n"
        "assert 2 <= time.monotonic() - began < 30\n"
        "dist.all_reduce(t)  # only one call hangs",
        ANYGAUGE_SIM_FAULTS="hang:all_reduce@1",
    )
    assert status == 0, out
    assert "ended: simccl all_reduce: no answer within 2000 ms; hung on purpose" in out


def test_a_collective_counts_under_its_name_and_under_any() -> None:
    status, out = run(
        GROUP + "for call in (dist.all_reduce, dist.barrier, dist.all_reduce, dist.all_reduce):\n"
        "    try:\n        call(t) if call is dist.all_reduce else call()\n        print('+')\n"
        "    except dist.DistBackendError as error:\n        print('-', error)\n",
        ANYGAUGE_SIM_FAULTS="fail:all_reduce@1,fail:any@2,fail:all_reduce@3",
    )
    assert status == 0, out
    said = [line.split(":")[0] for line in out.splitlines() if line[0] in "+-"]
    assert said == ["- simccl all_reduce", "- simccl barrier", "+", "- simccl all_reduce"]


def test_a_new_timeout_reaches_the_host_backend() -> None:
    """A peer that is really missing is missed by gloo, not by the fault."""
    store, long = dist.HashStore(), timedelta(seconds=60)

    def host(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, 2, long)

    with ThreadPoolExecutor(2) as pool:
        hosts = list(pool.map(host, range(2)))
    group = _C.SimCCL(hosts[0], long)
    group.set_timeout(timedelta(seconds=1))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        group.allreduce([torch.ones(2, device="sim")]).wait()
    assert time.monotonic() - began < 30


def test_a_slow_card_takes_its_factor() -> None:
    status, out = run(
        LOAD + "import time\n"
        "def least(device):\n"
        "    a, times = torch.ones(256, 256, device=device), []\n"
        "    for _ in range(10):\n"
        "        began = time.monotonic(); a @ a; times.append(time.monotonic() - began)\n"
        "    return min(times)\n"
        "print(least('sim:1') / least('sim:0'))",
        ANYGAUGE_SIM_FAULTS="slow:1@20",
    )
    assert status == 0, out
    assert 10 < float(out.splitlines()[-1]) < 100


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
