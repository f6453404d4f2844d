"""The backend object: what the core may ask about NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from anygauge.interface import (
    FULL,
    Backend,
    Collectives,
    LaunchProfile,
    Level,
    Options,
    ShapePolicy,
    Support,
    own_image,
)
from anygauge_cuda.diagnostics import RELEASES, checks
from anygauge_cuda.environment import (
    ALLOCATOR_NEW,
    ALLOCATOR_OLD,
    FABRICS,
    NCCL_SETTINGS,
    READINGS,
    RULES,
    TOPOLOGIES,
    VISIBLE,
)
from anygauge_cuda.placement import CudaPlacement, hardware_dtypes

if TYPE_CHECKING:
    import torch

# Source: PyTorch, tools/autograd/derivatives.yaml, which has no line for _scaled_mm.
NO_FP8 = Support(
    Level.NOT_WRITTEN_YET,
    "torch's product of FP8 numbers (_scaled_mm) has no gradient, and the libraries that bring one "
    "(Transformer Engine, torchao) are not connected yet",
)
# NVIDIA's advice for containers that run several processes with NCCL.
_SHARED_MEMORY = ("--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864")


class CudaOptions(Options):
    """Options of the cuda backend."""

    pad_to_multiple_of: Annotated[int, Field(ge=1)] = Field(
        64,
        description="Round the width of each batch up to a multiple of so many tokens: cuDNN's "
        "attention builds a plan for each new width, in more than half a second.",
    )


class CudaCollectives(Collectives):
    """NCCL, bound to the rank's GPU from the start: barriers then cannot pick another one."""

    process_group_backend = "nccl"
    binds_device = True


class CudaBackend(Backend):
    """NVIDIA GPUs."""

    name = "cuda"
    device_type = "cuda"
    placement_class = CudaPlacement
    collectives_class = CudaCollectives
    attention = "sdpa"
    attention_why = "torch chooses a fused operation by shape and mask"
    options: CudaOptions
    engine_names: Mapping[str, str] = {"deepspeed": "cuda"}
    # Source: torch.use_deterministic_algorithms, operations that differ on CUDA.
    sums_vary = "atomic additions finish in any order"
    fabrics = FABRICS
    environment_rules = RULES
    diagnostics = staticmethod(checks)
    variables = (ALLOCATOR_OLD, ALLOCATOR_NEW, VISIBLE)
    files = (*TOPOLOGIES, NCCL_SETTINGS)
    readings = READINGS
    launch = LaunchProfile(
        visibility_variable=VISIBLE,
        image=own_image("cuda", RELEASES),
        releases=RELEASES,
        container_flags=("--gpus=all", *_SHARED_MEMORY),
        # Source: docs.nvidia.com, Container Toolkit, Support for Container Device Interface.
        podman_flags=(
            "--device=nvidia.com/gpu=all",
            "--security-opt=label=disable",
            *_SHARED_MEMORY,
        ),
        cluster_resource="nvidia.com/gpu",
    )
    capabilities: Mapping[str, Support] = {
        "bfloat16": Support(Level.DEPENDS, "cards of compute capability 8.0 or newer have it"),
        "float16": Support(Level.DEPENDS, "cards of compute capability 7.0 or newer have it"),
        "collectives": FULL,
        # Source: bitsandbytes 0.50, backends/cuda/ops.py; its wheel has a library for each CUDA.
        "quantized_base": FULL,
        "quantized_base_int8": FULL,
        # Source: the same, functional.py: cget_managed_ptr is cudaMallocManaged.
        "paged_memory": FULL,
        # Source: PyTorch, aten/src/ATen/native/cuda/FusedAdamWKernel.cu.
        "fused_adamw": FULL,
        # Source: bitsandbytes 0.50, backends/cuda/ops.py.
        "adamw_8bit": FULL,
        "fp8_products": NO_FP8,
    }

    def __init__(self, options: CudaOptions | None = None) -> None:
        super().__init__(options or CudaOptions())
        self.graph.shapes = ShapePolicy(multiple=self.options.pad_to_multiple_of)

    def open(self, local_rank: int = 0) -> torch.device:
        """Take this local rank's GPU, which settles the types that it computes in."""
        device = super().open(local_rank)
        found = hardware_dtypes(device)
        lacking = Support(
            Level.UNSUPPORTED_BY_HARDWARE, f"the opened card has {', '.join(sorted(found))} only"
        )
        types = {name: FULL if name in found else lacking for name in ("bfloat16", "float16")}
        self.capabilities = {**self.capabilities, **types}
        return device

    def make_deterministic(self) -> str:
        """See `Backend.make_deterministic`."""
        super().make_deterministic()
        others = "kernels of other libraries, and NCCL's sums over several cards"
        return f"torch's own operations give equal bits; {others}, may not"
