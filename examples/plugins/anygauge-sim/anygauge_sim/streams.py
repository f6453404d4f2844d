"""Streams and events of the simulated device, as torch's own generic classes give them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def functions(name: str) -> dict[str, Any]:
    """Stream, Event and what selects them, for the device called ``name``."""

    class Stream(torch.Stream):
        """A queue of work; on this device all work has ended when its call returns."""

        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=device or name, priority=priority)

    class Event(torch.Event):
        """A moment in a stream."""

        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, device=name, enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        with chosen:
            yield

    def current_stream(device: Any = None) -> Any:
        index = torch.device(device).index if device is not None else None
        return torch.accelerator.current_stream(index)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "set_stream": torch.accelerator.set_stream,
    }
