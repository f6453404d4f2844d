"""A loop written by hand on torch's own engines, as a careful user would: LoRA, one process group.

Each micro-batch's loss is its own mean, as usual; gradients travel with the last micro-batch. Two
bounds are trained by the same loop. Nobody could use them for one model: processes end with
different weights.

``python -m benchmarks.contenders.torch_loop PLAN CONTENDER``, a key of `WRAPS`
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders.common import (
    adapted_model,
    batches,
    count_loss_tokens,
    on_device,
    optimizer_of,
    start,
    take_device,
    trained,
)
from benchmarks.plan import ContenderPlan

Sync = Callable[[bool], contextlib.AbstractContextManager[Any]]
"""(Whether a micro-batch is the step's last) -> what is around its forward and backward."""
Wrap = Callable[[ContenderPlan, Any], tuple[nn.Module, Sync]]
"""The adapted model -> what is called in its place, and how it sums gradients."""


def train(wrap: Wrap) -> None:
    """Train one rank."""
    plan, rank, ranks, recorder = start()
    device = take_device(plan)
    torch.manual_seed(plan.seed)
    adapted = adapted_model(plan, device)
    recorder.watch(adapted)
    called, sync = wrap(plan, adapted)
    optimizer = optimizer_of(plan, adapted)
    rows = batches(plan, rank, ranks)
    called.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for turn in range(plan.accumulation):
            batch = on_device(next(rows), device)
            with sync(turn == plan.accumulation - 1):
                loss = called(**batch).loss
                (loss / plan.accumulation).backward()
            count = count_loss_tokens(batch["labels"])
            loss_sum += float(loss.detach()) * count
            loss_tokens += count
        nn.utils.clip_grad_norm_(trained(adapted), plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
        recorder.rank_loss(loss_sum, loss_tokens)


def ddp(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
    """The model in DDP."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapper = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # What DDP does by itself, where it is counted: its own sum never passes through Python.
    wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    return wrapper, lambda last: contextlib.nullcontext() if last else wrapper.no_sync()


def fsdp(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
    """FSDP2 as its tutorial has it: each layer, then the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    sharded = fully_shard(model)

    def sync(last: bool) -> contextlib.AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return sharded, sync


def unsharded(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
    """The bound: each process trains the whole model alone, with no communication."""
    return model, lambda last: contextlib.nullcontext()


def sharded_bound(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
    """The bound of what is sharded: the same, while its layers' weights are gathered."""
    gathers = Gathers(plan, list(model.get_base_model().model.layers))
    AT_END.append(gathers.close)
    return unsharded(plan, model)


class Gathers:
    """Gathers of all layers' weights, each layer once for forward and once for backward.

    In place, into two buffers that stay, the next layer's while one computes. What is gathered is
    not read.

    Args:
        layers: in order; where they are recomputed, their forward is called in backward as well.
    """

    def __init__(self, plan: ContenderPlan, layers: list[nn.Module]) -> None:
        ranks = dist.get_world_size()
        sizes = [sum(p.numel() for p in m.parameters() if not p.requires_grad) for m in layers]
        like = next(layers[0].parameters())
        self._pieces = [like.new_zeros(-(-size // ranks)) for size in sizes]
        longest = max(map(len, self._pieces)) * ranks
        self._buffers = [like.new_empty(longest) for _ in range(2)]
        self._order = [*range(len(layers)), *reversed(range(len(layers)))]
        self._ranks, self._next = ranks, 0
        self._handle: Any = None
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.enter())
            if not plan.checkpointing:
                layer.register_forward_hook(self._at_backward)

    def enter(self) -> None:
        """The next layer in order begins: its weights have to be there, the next one's leave."""
        if self._handle is None:
            self._begin()
        self._handle.wait()
        self._next = (self._next + 1) % len(self._order)
        self._begin()

    def _begin(self) -> None:
        piece = self._pieces[self._order[self._next]]
        whole = self._buffers[self._next % 2][: len(piece) * self._ranks]
        self._handle = dist.all_gather_into_tensor(whole, piece, async_op=True)

    def close(self) -> None:
        """Wait for what is under way."""
        if self._handle is not None:
            self._handle.wait()

    def _at_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.enter())


WRAPS: Mapping[str, Wrap] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "unsharded": unsharded,
    "sharded-bound": sharded_bound,
}
ALONE = ("unsharded",)
"""Those whose processes share nothing."""
AT_END: list[Callable[[], None]] = []
"""What is to be done before the process group ends."""


def main() -> None:
    """Train one rank; of a process group, but for those that are alone."""
    name = sys.argv[2]
    if name in ALONE:
        train(WRAPS[name])
        return
    device = take_device(ContenderPlan.load(sys.argv[1]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(WRAPS[name])
    for close in AT_END:
        close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
