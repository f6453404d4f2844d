"""The backend object: what the core may ask about the host's processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.interface import (
    FULL,
    Backend,
    Check,
    Collectives,
    Job,
    LaunchProfile,
    Level,
    Node,
    RunFileError,
    Setting,
    Support,
)
from anygauge_cpu.diagnostics import checks
from anygauge_cpu.environment import environment
from anygauge_cpu.placement import CpuPlacement, hardware_dtypes


class CpuCollectives(Collectives):
    """Gloo, which comes with every build of torch."""

    process_group_backend = "gloo"


class CpuBackend(Backend):
    """The host's processors. Options: ``bind_cores`` (true or false; default true)."""

    name = "cpu"
    device_type = "cpu"
    placement_class = CpuPlacement
    collectives_class = CpuCollectives
    attention = "sdpa"
    known_options = ("bind_cores",)
    launch = LaunchProfile(binding="cores")
    capabilities: Mapping[str, Support] = {
        "bfloat16": Support(
            Level.PARTIAL,
            "emulated by converting to float32 and back, unless the processor has avx512_bf16, "
            "amx_bf16 or Arm's bf16",
        ),
        "float16": Support(
            Level.PARTIAL,
            "computed by converting to float32 and back on most processors: slower than float32, "
            "with a narrower range",
        ),
        "autocast": FULL,
        "collectives": FULL,
        "zero": FULL,
        "compile": Support(
            Level.NOT_WRITTEN_YET, "needs a C++ compiler on every node; no run was made with it"
        ),
        "mark_step": Support(
            Level.UNSUPPORTED_BY_HARDWARE,
            "each operation runs as it comes: there is no graph to cut",
        ),
        "graph_limit": Support(
            Level.UNSUPPORTED_BY_HARDWARE, "each operation runs as it comes: there is no graph"
        ),
        "memory_statistics": Support(
            Level.PARTIAL,
            "resident memory of the whole process: libraries and files count too",
        ),
        "peak_flops": Support(
            Level.UNSUPPORTED_BY_HARDWARE,
            "a processor's rate depends on the clock that its load allows: none is published",
        ),
    }

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Args: options: the run file's ``backend_options``.

        Raises:
            RunFileError: an option is unknown or has a value of the wrong type.
        """
        super().__init__(options)
        self._root = Path("/")
        bind = self.options.get("bind_cores", True)
        if not isinstance(bind, bool):
            raise RunFileError(f"backend_options.bind_cores: {bind!r} is neither true nor false")

    def support(self, capability: str) -> Support:
        """As declared, but for bfloat16, which depends on the processor."""
        if capability == "bfloat16" and "bfloat16" in hardware_dtypes(self._root):
            return FULL
        return super().support(capability)

    def environment(self, job: Job, node: Node, local_rank: int | None = None) -> Sequence[Setting]:
        """Threads, cores and gloo's network interface."""
        return environment(job, node, local_rank)

    def engine_settings(self, engine: str) -> Sequence[Setting]:
        """DeepSpeed would take a GPU of this machine if it were left to choose."""
        if engine != "deepspeed":
            return ()
        return (
            Setting(
                name="accelerator",
                value="cpu",
                reason="the run asked for the host's processors, whatever else is installed",
                source="deepspeed/accelerator/real_accelerator.py",
            ),
        )

    def diagnostics(self) -> Sequence[Check]:
        """See `anygauge_cpu.diagnostics`."""
        return checks()
