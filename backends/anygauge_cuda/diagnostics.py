"""The checks that `doctor` runs for NVIDIA GPUs: driver, torch, and what torch sees of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from anygauge.interface import Check, Outcome, read_releases
from anygauge_cuda.placement import without_kernels
from anygauge_cuda.probe import driver_version, probe

RELEASES = read_releases(Path(__file__).with_name("device.toml"))
"""What images are built of."""

OLDEST_DRIVER: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""CUDA major version -> oldest driver branch (NVIDIA CUDA Compatibility, minor versions)."""

_BUILD, _PAIR, _USABLE = "torch and CUDA", "driver for this torch", "usable GPUs"
_NO_GPU = "in a container, hand the GPUs in (docker run --gpus=all); in a cluster, ask for them"
_NO_DRIVER = "install NVIDIA's driver on the host (not in the container) and load it"
_NO_SOFTWARE = "install a build of torch with CUDA: pytorch.org/get-started"


def checks(root: Path = Path("/"), torch_folder: Path | None = None) -> Sequence[Check]:
    """Look at files first, then ask torch, so that each step that fails has its own line."""
    found = probe(root, torch_folder)
    results = [
        Check.of("GPUs", found.has_hardware, found.devices.detail, _NO_GPU),
        Check.of("driver", bool(found.driver), found.driver.detail, _NO_DRIVER),
        Check.of("torch", bool(found.software), found.software.detail, _NO_SOFTWARE),
    ]
    if found.software:
        results += [_build(), _compatibility(driver_version(root)), _usable(found.device_count)]
        results += _surprises() if results[-1].outcome != Outcome.FAIL else ()
    else:
        results += [
            Check.skip(name, "needs a torch with CUDA") for name in (_BUILD, _PAIR, _USABLE)
        ]
    return results


def driver_serves(driver: str, cuda: str) -> bool | None:
    """Whether a driver such as ``550.54.15`` serves CUDA such as ``12.8``; None if unknown."""
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    return None if oldest is None else int(driver.split(".")[0]) >= oldest


def _build() -> Check:
    import torch

    return Check(_BUILD, Outcome.PASS, f"torch {torch.__version__} for CUDA {torch.version.cuda}")


def _compatibility(driver: str | None) -> Check:
    import torch

    cuda = torch.version.cuda
    if driver is None or cuda is None:
        missing = "driver" if driver is None else "CUDA version of torch"
        return Check.skip(_PAIR, f"nothing to compare: the {missing} is not known")
    seen = f"driver {driver}, torch built for CUDA {cuda}"
    serves = driver_serves(driver, cuda)
    if serves is None:
        remedy = "compare with NVIDIA's CUDA Compatibility guide: this version is not known here"
        return Check.warn(_PAIR, seen, remedy)
    images = [r.name for r in RELEASES if r.built and driver_serves(driver, r.versions["cuda"])]
    ready = f"; images for this driver: anygauge image --release {images[-1]}" if images else ""
    remedy = f"install a newer driver, or a torch for an older CUDA{ready}"
    return Check.of(_PAIR, serves, seen, remedy)


def _usable(expected: int | None) -> Check:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        remedy = "compare driver and torch above; check CUDA_VISIBLE_DEVICES"
        return Check.of(_USABLE, False, str(error), remedy)
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    seen = f"{count} usable ({names})"
    lacking = next(filter(None, map(without_kernels, range(count))), "")
    if lacking:
        found, _, remedy = lacking.partition(": ")
        return Check.of(_USABLE, False, found, remedy)
    fewer = expected is not None and count < expected
    seen += f", of {expected} in this machine" if fewer else ""
    remedy = "check CUDA_VISIBLE_DEVICES, if fewer were not meant"
    return Check.of(_USABLE, not fewer, seen, remedy, Outcome.WARN)


def _surprises() -> Sequence[Check]:
    """Where this machine differs from what a run expects; nothing where it does not."""
    import torch

    found = []
    if torch.backends.cuda.matmul.allow_tf32:
        # Source: NVIDIA's release notes of its PyTorch images, which set this variable to 1.
        remedy = "for runs in float32: environment: {TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: '0'}"
        found.append(Check.warn("float32 products", "TF32, of 11 significant bits", remedy))
    if torch.cuda.device_count() > 1 and not torch.cuda.can_device_access_peer(0, 1):
        # Source: NVIDIA/nccl, issue 1838. Whether NCCL then fails shows only there.
        remedy = (
            "if NCCL fails with 'peer access is not supported between these two devices': "
            "environment: {NCCL_CUMEM_HOST_ENABLE: '0'} in the run file"
        )
        found.append(Check.warn("peer access", "GPU 0 cannot reach the memory of GPU 1", remedy))
    return found
