"""Processes of tests beside that meet: `python -m tests.util.meet_processes ROLE AT`.

Each prints what came of it as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anygauge.interface import AnygaugeError, Collectives
from tests.helpers.child_processes import end

LIMIT_S = 3.0
LONG_S = 4.5
HANGS_S = 120
"""Torch's own default is 1800."""
PICKLE = b"cos\nsystem\n(S'>mark'\ntR."
"""Writes a file ``mark`` when it is loaded."""


def run_roles(*roles: str, at: str, folder: Path, awaited: int = 2) -> list[Any]:
    """What the first processes, so many of them, print; then all are ended."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, role, at], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for role in roles
    ]  # fmt: skip
    try:
        outputs = [each.communicate(timeout=HANGS_S) for each in processes[:awaited]]
    finally:
        end(*processes)
    return [json.loads(out.splitlines()[-1]) if out else err for out, err in outputs]


def opened(at: str, rank: int, world: int = 2, secret: str = "") -> Collectives:
    collectives = Collectives("cpu")
    collectives.open(
        rendezvous=at, rank=rank, world_size=world, timeout_s=60, secret=secret,
        device=torch.device("cpu"),
    )  # fmt: skip
    return collectives


def honest(at: str) -> str:
    """Rank 0 of two, with the job's secret."""
    try:
        return f"believed: {opened(at, 0, secret='its').gather_objects('mine')}"
    except AnygaugeError as error:
        return str(error)


def stranger(at: str) -> str:
    """Knows no secret, but all else: joins as rank 1, and sends a pickle where a proof belongs."""
    minute = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(at.rpartition(":")[2]), 2, False, minute)
    while not (found := re.search("[0-9a-f]{32}", " ".join(store.list_keys()))):
        time.sleep(0.05)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(found[0], store), rank=1, world_size=2, timeout=minute
    )
    parts = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(parts, parts[0].clone())  # everyone's own number
    proofs = [torch.zeros(32, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(proofs, torch.tensor(list(PICKLE.ljust(32)), dtype=torch.uint8))
    return "joined"


def patient(at: str, rank: int) -> dict[str, str]:
    """One of two whose groups have a limit; rank 1 stops itself in the end."""
    collectives = opened(at, rank)
    # As libraries make theirs: without a word on time.
    before = dist.new_group(ranks=[0, 1])
    with collectives.patient_timeout(then=LIMIT_S):
        during = dist.new_group(ranks=[0, 1])
        if rank == 0:
            time.sleep(LONG_S)  # all the while rank 1 waits for it, first in a library's group
        dist.all_reduce(torch.ones(1), group=during)
    after = dist.new_group(ranks=[0, 1])
    for group in (before, during, after):
        dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    failed = {}
    for name, group in (("before", before), ("after", after)):
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            failed[name] = str(error)
    return failed


if __name__ == "__main__":
    role, at = sys.argv[1:]
    roles = {"honest": honest, "stranger": stranger}
    found = roles[role](at) if role in roles else patient(at, int(role))
    print(json.dumps(found), flush=True)
    os._exit(0)  # what is left of the groups waits for nobody
