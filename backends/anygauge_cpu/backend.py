"""The backend object: what the core may ask about the host's processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from anygauge.interface import (
    FULL,
    Backend,
    Collectives,
    LaunchProfile,
    Level,
    Options,
    Support,
    own_image,
    read_releases,
)
from anygauge_cpu.diagnostics import checks
from anygauge_cpu.environment import ALLOCATORS, RULES
from anygauge_cpu.placement import CpuPlacement

RELEASES = read_releases(Path(__file__).with_name("device.toml"))

# Source: PyTorch, tools/autograd/derivatives.yaml, which has no line for _scaled_mm.
NO_FP8 = Support(
    Level.NOT_WRITTEN_YET,
    "torch's product of FP8 numbers (_scaled_mm) has no gradient, and no layer here brings one",
)


class CpuOptions(Options):
    """Options of the cpu backend."""

    bind_cores: bool = Field(True, description="Each rank of a machine gets cores of its own.")
    preload_allocator: bool = Field(
        True, description="Use a faster memory allocator, where one is installed."
    )


class CpuCollectives(Collectives):
    """Gloo, which comes with every build of torch."""

    process_group_backend = "gloo"


class CpuBackend(Backend):
    """The host's processors."""

    name = "cpu"
    device_type = "cpu"
    placement_class = CpuPlacement
    collectives_class = CpuCollectives
    kernels: Mapping[str, str] = {"lora_linear": "addmm"}
    attention = "sdpa"
    attention_why = "torch's fused operation, which never holds the scores of all positions"
    options: CpuOptions
    engine_names: Mapping[str, str] = {"deepspeed": "cpu"}
    environment_rules = RULES
    diagnostics = staticmethod(checks)
    files = ALLOCATORS
    launch = LaunchProfile(
        image=own_image("cpu", RELEASES),
        releases=RELEASES,
        # PyTorch's advice: the usual 64 MiB of shared memory are too few for several processes.
        container_flags=("--shm-size=1g",),
        binding="none",  # `open` binds a rank, for loops of one's own as well
    )
    capabilities: Mapping[str, Support] = {
        # oneDNN prepares a product anew for each shape, about 10 ms that lengths which change from
        # batch to batch pay again and again.
        "bfloat16": Support(
            Level.PARTIAL,
            "slower than float32: emulated by converting to float32 and back, unless the processor "
            "has avx512_bf16, amx_bf16 or Arm's bf16; with them, each new shape is prepared first",
        ),
        "float16": Support(
            Level.PARTIAL,
            "computed by converting to float32 and back on most processors: slower than float32, "
            "with a narrower range",
        ),
        "collectives": FULL,
        # Source: bitsandbytes 0.50, backends/cpu/ops.py and backends/default/ops.py.
        "quantized_base": FULL,
        "quantized_base_int8": FULL,
        "paged_memory": Support(
            Level.UNSUPPORTED_BY_HARDWARE,
            "there is no device to make room on: its tensors lie in the host's memory",
        ),
        # Source: PyTorch, aten/src/ATen/native/cpu/FusedAdamKernel.cpp.
        "fused_adamw": FULL,
        # Source: bitsandbytes 0.50, backends/cpu/ops.py.
        "adamw_8bit": FULL,
        "fp8_products": NO_FP8,
    }

    def __init__(self, options: CpuOptions | None = None) -> None:
        super().__init__(options or CpuOptions())
