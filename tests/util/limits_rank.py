"""One of two ranks of `test_limits`; rank 1 stops itself in the end, and rank 0 says what it saw.

Arguments: rendezvous, rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from anygauge.interface import Collectives

LIMIT_S = 3.0
LONG_S = 4.5


def main(rendezvous: str, rank: int) -> None:
    collectives = Collectives("cpu")
    collectives.open(
        rendezvous=rendezvous,
        rank=rank,
        world_size=2,
        timeout_s=120,
        device=torch.device("cpu"),
    )
    # As libraries make theirs: without a word on time.
    before = dist.new_group(ranks=[0, 1])
    with collectives.patient(then=LIMIT_S):
        during = dist.new_group(ranks=[0, 1])
        if rank == 0:
            time.sleep(LONG_S)  # all the while rank 1 waits for it, first in a library's group
        dist.all_reduce(torch.ones(1), group=during)
    after = dist.new_group(ranks=[0, 1])
    for group in (before, during, after):
        dist.all_reduce(torch.ones(1), group=group)
    seen: dict[str, object] = {"came through": True}
    if rank == 1:
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    for name, group in (("before", before), ("after", after)):
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            seen[name] = str(error)
    print(json.dumps(seen), flush=True)
    os._exit(0)  # what is left of the groups waits for nobody


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
