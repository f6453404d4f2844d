"""torch's DDP by hand: see `torch_loop`."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.torch_loop import Sync, train_together
from benchmarks.plan import ContenderPlan


def wrap(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
    """The model in DDP."""
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # What DDP does by itself, where it is counted: its own sum never passes through Python.
    wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    return wrapper, lambda last: contextlib.nullcontext() if last else wrapper.no_sync()


if __name__ == "__main__":
    train_together(wrap)
