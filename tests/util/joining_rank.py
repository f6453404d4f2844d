"""A process of `test_strangers` that joins at a port: `joining_rank.py ROLE PORT`.

``honest`` is rank 0 of two and opens its collectives with the job's secret. ``stranger`` knows no
secret, but all else: it reads in the store where the ranks meet, joins as rank 1, and sends a
pickle where a proof belongs. Each prints what came of it as JSON.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import time

import torch
import torch.distributed as dist

from anygauge.interface import AnygaugeError, Collectives

PICKLE = b"cos\nsystem\n(S'>mark'\ntR."
"""Writes a file ``mark`` when it is loaded."""


def honest(port: int) -> str:
    collectives = Collectives("cpu")
    try:
        collectives.open(
            rendezvous=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout_s=60,
            device=torch.device("cpu"), secret="the job's",
        )  # fmt: skip
        return f"believed: {collectives.gather_objects('mine')}"
    except AnygaugeError as error:
        return str(error)


def stranger(port: int) -> str:
    store = dist.TCPStore("127.0.0.1", port, 2, False, datetime.timedelta(seconds=60))
    while not (found := re.search("[0-9a-f]{32}", " ".join(store.list_keys()))):
        time.sleep(0.05)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(found[0], store), rank=1, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    parts = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(parts, parts[0].clone())  # everyone's own number
    proofs = [torch.zeros(32, dtype=torch.uint8) for _ in range(2)]
    own = torch.tensor(list(PICKLE.ljust(32)), dtype=torch.uint8)
    dist.all_gather(proofs, own)
    return "joined"


if __name__ == "__main__":
    role, port = sys.argv[1], int(sys.argv[2])
    print(json.dumps(honest(port) if role == "honest" else stranger(port)), flush=True)
