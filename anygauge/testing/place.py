"""Which module is being computed: in the forward by hooks, in the backward by its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Place:
    """Where a model's computation is.

    A node of the backward has the number that autograd counted to when the forward made it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._inside: list[str] = []
        self._of_nodes: dict[int, str] = {}

    def note(self) -> None:
        """An operation runs: its backward, if it has one, belongs to this module."""
        if self._inside and not in_backward():
            # Those that follow without a node of their own find the same number.
            number = torch._C._autograd._get_sequence_nr() - 1
            self._of_nodes.setdefault(number, self._inside[-1])

    def __str__(self) -> str:
        """Such as `` in model.layers.0.self_attn, backward``; empty outside of all modules."""
        name, phase = self._inside[-1] if self._inside else "", ""
        if in_backward():
            phase = ", recomputed" if name else ", backward"
            node = torch._C._current_autograd_node()
            if not name and node is not None:
                name = self._of_nodes.get(node._sequence_nr(), "")
        name = name.removeprefix("base_model.model.")
        return f" in {name}{phase}" if name else phase

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Hook before a forward."""
        self._inside.append(self._names.get(module, self._inside[-1] if self._inside else ""))

    def leave(self, *_: Any) -> None:
        """Hook after it, also after one that ended early."""
        if self._inside:
            self._inside.pop()


def in_backward() -> bool:
    """Whether this thread computes a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def place_in(model: nn.Module) -> Iterator[Place]:
    """Follow every forward while it lasts."""
    place = Place(model)
    handles = [
        register_module_forward_pre_hook(place.enter),
        register_module_forward_hook(place.leave, always_call=True),
    ]
    try:
        yield place
    finally:
        for handle in handles:
            handle.remove()
