"""What goes over the host, on two real processes; the table of the kit has those of tensors."""

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
    """What came of every operation."""
    rank, _ = rank_of_world()
    alone, collectives = Collectives("cpu"), backend.collectives
    seen: dict[str, Any] = {"alone": [alone.sum_on_host([2.5]), alone.gather_objects("me")]}
    with pytest.raises(ValueError, match="'product' is none of"):
        collectives.all_reduce(torch.ones(1), "product")  # before anyone waits
    seen["objects"] = collectives.gather_objects({"rank": rank, "host": f"h{rank}"})
    # A whole number beyond float32: 2**24 + 1 would come back as 2**24.
    seen["sum on host"] = collectives.sum_on_host([2.0**24 if rank == 0 else 1.0, 0.5])
    collectives.barrier()
    collectives.close()
    seen["closed"] = collectives.control_group is None and not torch.distributed.is_initialized()
    return seen


RESULTS = {
    "alone": [[2.5], ["me"]],
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
