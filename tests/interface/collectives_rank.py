"""One rank of `test_collectives`: joins the group, does every operation, prints what came of it.

Arguments: rendezvous, rank, world size.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from anygauge.interface import Collectives


def main(rendezvous: str, rank: int, world_size: int) -> None:
    collectives = Collectives("cpu")
    seen: dict[str, Any] = {
        "alone": [collectives.sum_on_host([2.5]), collectives.gather_objects("me")]
    }
    collectives.open(
        rendezvous=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout_s=60,
        device=torch.device("cpu"),
    )
    own = torch.tensor([1.0 + rank, 10.0 * rank])
    for op in ("sum", "mean", "max"):
        tensor = own.clone()
        returned = collectives.all_reduce(tensor, op)
        seen[op] = tensor.tolist()
        seen["in_place"] = returned is tensor
    gaps = torch.stack([own, own * 2])
    collectives.all_reduce(gaps[:, 0], "mean")
    collectives.broadcast(gaps[:, 1], source=world_size - 1)
    seen["gaps"] = gaps.tolist()
    try:
        collectives.all_reduce(own.clone(), "product")
    except ValueError as error:
        seen["refused"] = str(error)
    seen["broadcast"] = collectives.broadcast(own.clone(), source=world_size - 1).tolist()
    seen["all_gather"] = [part.tolist() for part in collectives.all_gather(own)]
    seen["objects"] = collectives.gather_objects({"rank": rank, "host": f"h{rank}"})
    # A whole number beyond float32: 2**24 + 1 would come back as 2**24.
    seen["host_sum"] = collectives.sum_on_host([2.0**24 if rank == 0 else 1.0, 0.5])
    collectives.barrier()
    collectives.close()
    seen["closed"] = collectives.control_group is None and not torch.distributed.is_initialized()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
