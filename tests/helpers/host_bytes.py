"""Bytes of tensors in the host's memory, counted as they come and go."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class HostBytes(TorchDispatchMode):
    """Counts memory of tensors that operations make on the host while this is entered.

    Attributes:
        live: bytes now.
        peak: most at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self.saw(tensor)
        return result

    def saw(self, tensor: Tensor) -> None:
        """Count a tensor that no operation made, such as one that was read."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not place:
            return
        if place not in self._users:
            self.live += size
            self.peak = max(self.peak, self.live)
        self._users[place] = self._users.get(place, 0) + 1
        weakref.finalize(tensor, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.live -= size
