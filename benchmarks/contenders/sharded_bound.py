"""The bound of sharding: the plain loop, and no more of it than its weights' way between ranks.

Each process trains the whole model alone, as `unsharded` does. Around it every layer's weights are
gathered as sharding by a formula has to: once for forward, once for backward; in place, into two
buffers that stay, the next layer's while one computes. Nobody could use it for one model: what is
gathered is not read, and the processes end with different weights.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders.common import take_device
from benchmarks.contenders.torch_loop import Sync, train
from benchmarks.plan import ContenderPlan


class Gathers:
    """Gathers of all layers, each begun when the layer before it begins.

    Args:
        layers: in order; each is asked for once in forward and once in backward.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        ranks = dist.get_world_size()
        sizes = [sum(p.numel() for p in m.parameters() if not p.requires_grad) for m in layers]
        like = next(layers[0].parameters())
        self._pieces = [like.new_zeros(-(-size // ranks)) for size in sizes]
        longest = max(map(len, self._pieces)) * ranks
        self._buffers = [like.new_empty(longest) for _ in range(2)]
        self._order = [*range(len(layers)), *reversed(range(len(layers)))]
        self._ranks, self._next = ranks, 0
        self._handle: Any = None

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


def watched(model: Any, *, recomputed: bool) -> Gathers:
    """Gathers of a model's layers, hung on it.

    Args:
        recomputed: each layer's forward is called in backward as well.
    """
    layers = list(model.get_base_model().model.layers)
    gathers = Gathers(layers)
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: gathers.enter())
        if not recomputed:
            layer.register_forward_hook(_at_backward(gathers))
    return gathers


def _at_backward(gathers: Gathers) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: gathers.enter())

    return hook


def main() -> None:
    """Train one process by itself, between gathers of all."""
    device = take_device(ContenderPlan.load(sys.argv[1]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    gathers: list[Gathers] = []

    def wrap(plan: ContenderPlan, model: Any) -> tuple[nn.Module, Sync]:
        gathers.append(watched(model, recomputed=plan.checkpointing))
        return model, lambda last: contextlib.nullcontext()

    train(wrap)
    gathers[0].close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
