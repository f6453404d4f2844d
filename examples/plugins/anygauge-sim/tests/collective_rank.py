"""One rank that calls every collective of simccl, and asserts what the kit's table does not."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main(rendezvous: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from anygauge_sim.device import load
    from anygauge_sim.settings import COLLECTIVES

    sim = load()
    sim.set_device(rank)
    dist.init_process_group("simccl", init_method=rendezvous, rank=rank, world_size=size)
    device = f"sim:{rank}"
    total = sum(range(size))

    def mine(count: int = 3) -> torch.Tensor:
        return torch.full((count,), float(rank), device=device)

    tensor = mine()
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == [1] * 3
    parts = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(parts, mine())
    assert [part.tolist() for part in parts] == [[each] * 3 for each in range(size)]
    whole = torch.empty(3 * size, device=device)
    dist.all_gather_into_tensor(whole, mine())
    part = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(part, whole)
    assert part.tolist() == [rank * size] * 3
    dist.reduce_scatter(part, list(whole.chunk(size)))
    assert part.tolist() == [rank * size] * 3
    lists = [torch.empty(2, device=device) for _ in range(size)]
    dist.all_to_all(
        lists, [torch.full((2,), 10.0 * rank + to, device=device) for to in range(size)]
    )
    assert [each.tolist() for each in lists] == [[10 * each + rank] * 2 for each in range(size)]
    gathered = [torch.empty(3, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(), gathered)
    if gathered is not None:
        assert [each.tolist() for each in gathered] == [[each] * 3 for each in range(size)]
    scattered = torch.empty(1, device=device)
    chunks = [torch.full((1,), 7.0 + each, device=device) for each in range(size)]
    dist.scatter(scattered, chunks if rank == 0 else None)
    assert scattered.tolist() == [7 + rank]
    reduced = mine()
    dist.reduce(reduced, dst=0, op=dist.ReduceOp.AVG)
    if rank == 0:
        assert reduced.tolist() == [total / size] * 3
    mean = mine()
    work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    assert mean.tolist() == [total / size] * 3, "completed, but not divided"
    work.wait()
    assert mean.tolist() == [total / size] * 3, "divided once"
    if rank < 2:
        other = 1 - rank
        got = torch.empty(3, device=device)
        sending = dist.isend(mine(), other)
        dist.recv(got, other)
        sending.wait()
        assert got.tolist() == [other] * 3
    several = [mine(2), mine(4)]
    with dist._coalescing_manager(device=torch.device(device)):
        for each in several:
            dist.all_reduce(each)
    assert all(each.tolist() == [total] * len(each) for each in several)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "device" in str(error) or "backend" in str(error).lower(), error
    else:
        raise AssertionError("a tensor of the host was taken")
    counted = sim.counters()
    assert counted["collective_bytes"]["all_gather_into_tensor"] == 12
    if rank < 2:
        assert set(counted["collective_calls"]) == set(COLLECTIVES), "the names that faults take"
    group = dist.new_group(list(range(size)))
    tensor = mine()
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [total] * 3
    dist.destroy_process_group()
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1])
