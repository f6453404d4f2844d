"""The run file's ``backend_options`` for the host's processors."""

from __future__ import annotations

from pydantic import Field

from anygauge.interface import Options


class CpuOptions(Options):
    """Options of the cpu backend."""

    bind_cores: bool = Field(True, description="Each rank of a machine gets cores of its own.")
    preload_allocator: bool = Field(
        True, description="Use a faster memory allocator, where one is installed."
    )
