"""Kernels that no vendor's library has to bring: softmax, attention around it, loss, an update."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from anygauge.interface import KernelSpec, hookimpl

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


def why_no_triton() -> str | None:
    """Why kernels that Triton or torch compiles for a GPU cannot run here, or None."""
    if find_spec("triton") is None:
        return "triton is not installed; it comes with the CUDA builds of torch"
    # Triton builds what starts a kernel with them, on each machine.
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        return "there is no C compiler (CC, cc, gcc, clang), which Triton needs"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's headers (Python.h; Debian: python3-dev), which Triton needs, are not here"
    return None


# Those in Triton are defaults: an H200 ran them faster than plain torch, and as exactly. No card
# has trained with what torch compiles.
@hookimpl
def anygauge_provide_kernels() -> Iterable[KernelSpec]:
    """Announce the kernels."""
    return [
        KernelSpec(
            operation="softmax",
            name="reference",
            factory="anygauge_kernels.softmax:reference",
            api_version=WRITTEN_FOR,
        ),
        KernelSpec(
            operation="softmax",
            name="triton",
            factory="anygauge_kernels.triton_softmax:kernel",
            api_version=WRITTEN_FOR,
            device_types=frozenset({"cuda"}),
            missing=why_no_triton,
            default=True,
        ),
        KernelSpec(
            operation="linear_cross_entropy",
            name="triton",
            factory="anygauge_kernels.triton_loss:kernel",
            api_version=WRITTEN_FOR,
            device_types=frozenset({"cuda"}),
            missing=why_no_triton,
            default=True,
        ),
        KernelSpec(
            operation="attention",
            name="softmax",
            factory="anygauge_kernels.softmax_attention:with_softmax",
            api_version=WRITTEN_FOR,
            uses=("softmax",),
        ),
        KernelSpec(
            operation="attention",
            name="blocks",
            factory="anygauge_kernels.blocks:compiled_attention",
            api_version=WRITTEN_FOR,
            device_types=frozenset({"cuda"}),
            missing=why_no_triton,
        ),
        KernelSpec(
            operation="lora_linear",
            name="addmm",
            factory="anygauge_kernels.lora:addmm",
            api_version=WRITTEN_FOR,
        ),
        KernelSpec(
            operation="linear_cross_entropy",
            name="chunked",
            factory="anygauge_kernels.linear_cross_entropy:chunked",
            api_version=WRITTEN_FOR,
            default=True,
        ),
        KernelSpec(
            operation="adamw",
            name="early_epsilon",
            factory="anygauge_kernels.adamw:early_epsilon",
            api_version=WRITTEN_FOR,
            counterpart="early_epsilon",
        ),
    ]
