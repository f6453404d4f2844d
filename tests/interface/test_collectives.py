"""Each operation means the same on every rank: two real processes on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge.interface import Backend, Collectives
from tests.helpers.build import rank_of_world
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo",
)


def seen_by_a_rank(backend: Backend) -> dict[str, Any]:
    """What came of every operation; rank 0 has [1, 0], rank 1 has [2, 10]."""
    rank, world = rank_of_world()
    alone, collectives = Collectives("cpu"), backend.collectives
    seen: dict[str, Any] = {"alone": [alone.sum_on_host([2.5]), alone.gather_objects("me")]}
    own = torch.tensor([1.0 + rank, 10.0 * rank])
    for op in ("sum", "mean", "max"):
        tensor = own.clone()
        returned = collectives.all_reduce(tensor, op)
        seen[op] = tensor.tolist()
        seen["in place"] = returned is tensor
    gaps = torch.stack([own, own * 2])
    collectives.all_reduce(gaps[:, 0], "mean")
    collectives.broadcast(gaps[:, 1], source=world - 1)
    seen["gaps"] = gaps.tolist()
    with pytest.raises(ValueError, match="'product' is none of"):
        collectives.all_reduce(own.clone(), "product")  # before anyone waits
    seen["broadcast"] = collectives.broadcast(own.clone(), source=world - 1).tolist()
    seen["all_gather"] = [part.tolist() for part in collectives.all_gather(own)]
    seen["objects"] = collectives.gather_objects({"rank": rank, "host": f"h{rank}"})
    # A whole number beyond float32: 2**24 + 1 would come back as 2**24.
    seen["sum on host"] = collectives.sum_on_host([2.0**24 if rank == 0 else 1.0, 0.5])
    collectives.barrier()
    collectives.close()
    seen["closed"] = collectives.control_group is None and not torch.distributed.is_initialized()
    return seen


RESULTS = {
    "alone": [[2.5], ["me"]],
    "sum": [3.0, 10.0],
    "mean": [1.5, 5.0],
    "max": [2.0, 10.0],
    "in place": True,
    "gaps": [[1.5, 10.0], [3.0, 20.0]],
    "broadcast": [2.0, 10.0],
    "all_gather": [[1.0, 0.0], [2.0, 10.0]],
    "objects": [{"rank": 0, "host": "h0"}, {"rank": 1, "host": "h1"}],
    "sum on host": [2.0**24 + 1, 1.0],
    "closed": True,
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(seen_by_a_rank, world=2, environment={"GLOO_SOCKET_IFNAME": "lo"})


@pytest.mark.parametrize("operation", RESULTS)
def test_every_rank_has_the_result(ranks: list[dict[str, Any]], operation: str) -> None:
    assert [seen[operation] for seen in ranks] == [RESULTS[operation]] * 2
