"""A training loop of your own on any backend: ``python examples/own_loop.py [BACKEND [DTYPE]]``.

For several ranks start one process each with RANK, LOCAL_RANK, WORLD_SIZE, and MEET: the path of a
file that is not there yet.
"""

import os
import sys

import torch

import anygauge
from anygauge.interface import Phase

RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
RANKS = int(os.environ.get("WORLD_SIZE", 1))


def train(backend, dtype):
    """Learn a sum; every rank has rows of its own."""
    placement, collectives, graph = backend.placement, backend.collectives, backend.graph
    if RANKS > 1:
        meet = f"file://{os.environ['MEET']}"
        group = {"rank": RANK, "world_size": RANKS, "device": placement.device}
        collectives.open(rendezvous=meet, timeout_s=60, **group)
    placement.seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1))
    model.to(placement.device)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    for weight in weights if RANKS > 1 else ():
        collectives.broadcast(weight.data)  # rank 0's
    for step in range(20):
        x = torch.randn(64, 8)
        batch = placement.to_device({"x": x, "y": x.sum(1, keepdim=True)})
        with placement.autocast(dtype):  # float32: changes nothing
            loss = (model(batch["x"]) - batch["y"]).pow(2).mean()
        loss.backward()
        graph.mark_step(Phase.BACKWARD)  # nothing to end where no graph accumulates
        for weight in weights if RANKS > 1 else ():
            collectives.all_reduce(weight.grad, op="mean")
        optimizer.step()
        optimizer.zero_grad()
        graph.mark_step(Phase.UPDATE)
        loss = loss.detach()
        losses = collectives.all_gather(loss) if RANKS > 1 else [loss]
        print(f"step {step}: loss {sum(map(float, losses)) / RANKS:.6f}")


if __name__ == "__main__":
    name, dtype = [*sys.argv[1:], *("auto", "float32")[len(sys.argv) - 1 :]]
    with anygauge.open_backend(name, local_rank=LOCAL_RANK) as backend:
        train(backend, getattr(torch, dtype))
