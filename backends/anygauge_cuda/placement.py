"""Opens one GPU for one process, and answers for its memory and arithmetic."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import Card, NotAvailableError, PeakFlops, Placement, read_cards

if TYPE_CHECKING:
    import torch


def hardware_dtypes(device: torch.device) -> frozenset[str]:
    """Types that a card computes in at full speed."""
    import torch

    found = {"float32"}
    # Without this argument cards are counted in that emulate it, at a fraction of the speed.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        found.add("bfloat16")
    # Tensor cores for float16 came with compute capability 7.0 (CUDA programming guide).
    if torch.cuda.get_device_capability(device) >= (7, 0):
        found.add("float16")
    return frozenset(found)


def has_kernels(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Whether a card runs what torch was built for (``torch.cuda.get_arch_list``).

    Code for ``sm_86`` runs on cards of the same major version and no smaller minor one;
    ``compute_86``, compiled when it is loaded, on all that are not smaller (CUDA C++ guide).
    """
    found = (re.match(r"(sm|compute)_(\d+)(\d)", name) for name in built)
    return any(
        (int(each[2]), int(each[3])) <= capability
        and (each[1] == "compute" or int(each[2]) == capability[0])
        for each in found
        if each
    )


def without_kernels(index: int) -> str:
    """Why the installed torch cannot compute on a card, and which can; "" where it can."""
    import torch

    built, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(index)
    if not built or has_kernels(capability, built):
        return ""
    # Source: torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC.
    build = "cu126" if capability < (7, 5) else "cu130"
    return (
        f"{torch.cuda.get_device_name(index)} has compute capability "
        f"{'.'.join(map(str, capability))}, and torch {torch.__version__} has kernels for "
        f"{' '.join(built)} alone: install one from https://download.pytorch.org/whl/{build} (make "
        "TORCH_INDEX=..., pip install torch --index-url ...)"
    )


def published_peak(device_name: str, dtype: str) -> PeakFlops | None:
    """The dense peak of a card for ``float32``, ``float16`` or ``bfloat16``.

    None for a card that device.toml does not list by the driver's whole name: those of slices of a
    card, and of other cards, begin alike, and a guess would make a wrong utilization look measured.
    """
    card = _by_driver_name().get(device_name)
    if card is None or dtype not in card.flops:
        return None
    return PeakFlops(value=card.flops[dtype], source=card.sources[f"flops.{dtype}"])


@cache
def _by_driver_name() -> dict[str, Card]:
    file = Path(__file__).with_name("device.toml")
    cards = read_cards(file.read_text(encoding="utf-8"), file.name)
    return {name: card for card in cards for name in card.names}


class CudaPlacement(Placement):
    """One GPU, by its number among those that the process may see."""

    # What torch's allocator did not see, as the driver or cuBLAS asked for it; or of which it could
    # not report how much there is (pytorch/pytorch, issue 112377).
    out_of_memory_texts = (
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
    )

    # -- opening ---------------------------------------------------------------------------

    def open(self, local_rank: int) -> torch.device:
        """Take the GPU of this local rank, if torch has kernels for it."""
        import torch

        if torch.version.cuda is None:
            raise NotAvailableError(
                f"torch {torch.__version__} is built without CUDA: install a build with it "
                "(pytorch.org/get-started), or choose --backend cpu"
            )
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            raise NotAvailableError(
                f"CUDA cannot be used: {error}. `anygauge backends` shows what was looked at on "
                "this machine"
            ) from error
        device = super().open(local_rank)
        lacking = without_kernels(local_rank)
        if lacking:
            super().close()
            raise NotAvailableError(lacking)
        return device

    def event(self) -> Any:
        """Waits for it block: a wait that spins takes a core, and looks like work to the agent."""
        return self._module().Event(enable_timing=True, blocking=True)

    def close(self) -> None:
        """Give cached memory back to the driver: others may need it while this process lives on."""
        if self._device is not None:
            self._module().empty_cache()
        super().close()

    # -- memory ----------------------------------------------------------------------------

    def utilization(self) -> Mapping[str, float]:
        """What NVML tells of the opened card; nothing where its bindings are not installed."""
        import torch

        if importlib.util.find_spec("pynvml") is None:
            return {}
        readers: dict[str, Callable[[torch.device], float]] = {
            "utilization_percent": torch.cuda.utilization,
            "memory_utilization_percent": torch.cuda.memory_usage,
            "power_w": lambda device: torch.cuda.power_draw(device) / 1000,
            "temperature_c": torch.cuda.temperature,
        }
        found = {}
        for name, read in readers.items():
            # NVML raises where a card, or a part of one, has no such counter.
            with contextlib.suppress(Exception):
                found[name] = float(read(self.device))
        return found

    # -- arithmetic ------------------------------------------------------------------------

    def peak_flops(self, dtype: str) -> PeakFlops | None:
        """The datasheet's dense rate of the opened card; None for a card without an entry."""
        import torch

        if dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
            # Multiplications then run in TF32, and the plain float32 rate is not a bound on them.
            dtype = "tf32"
        return published_peak(torch.cuda.get_device_name(self.device), dtype)

    @property
    def float32_product_bits(self) -> int:  # type: ignore[override]
        """11 where products run in TF32, as in NVIDIA's images of torch, which set
        TORCH_ALLOW_TF32_CUBLAS_OVERRIDE."""
        import torch

        return 11 if torch.backends.cuda.matmul.allow_tf32 else 24
