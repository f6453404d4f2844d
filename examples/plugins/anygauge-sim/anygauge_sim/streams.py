"""Streams, events and the choice of a card, by torch's own generic classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def functions(name: str) -> dict[str, Any]:
    """Stream, Event, device and what selects them, for the device called ``name``."""

    class Stream(torch.Stream):
        """A queue of work; on this device all work has ended when its call returns."""

        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=device or name, priority=priority)

    class Event(torch.Event):
        """A moment in a stream."""

        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            # A plain one: between instances of a class of its own torch measures no time.
            return torch.Event(device=name, enable_timing=enable_timing)

    class Card(torch.accelerator.device_index):
        """A card that is the current one for a while."""

        def __init__(self, device: Any) -> None:
            super().__init__(device if isinstance(device, int) else torch.device(device).index)

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
        "device": Card,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "set_stream": torch.accelerator.set_stream,
    }
