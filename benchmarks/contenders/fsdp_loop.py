"""torch's FSDP2 by hand, as its tutorial has it: each layer, then the root. See `torch_loop`."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.contenders.torch_loop import Sync, train_together
from benchmarks.plan import ContenderPlan


def wrap(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
    """The model in shards of its layers."""
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    sharded = fully_shard(model)

    def sync(last: bool) -> contextlib.AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return sharded, sync


if __name__ == "__main__":
    train_together(wrap)
