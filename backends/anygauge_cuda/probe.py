"""Are there NVIDIA GPUs, is their driver loaded, and is torch built for them? Files only.

A GPU shows itself in three places, any of which a container may hide: the PCI bus, the driver's
folder in /proc, and the device files. Under gVisor there are the device files alone. Under Windows'
WSL there is none of them, but a paravirtual device and the driver's library.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from anygauge.interface import Finding, Probe, count_of, file_text, pci_devices

_GPU = "NVIDIA GPU"
_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"  # PCI base class 3: VGA (0x0300) and 3D (0x0302) controllers
_WSL_DEVICE = "dev/dxg"
_WSL_LIBRARIES = "usr/lib/wsl/lib"
# What a container under WSL gets instead (nvidia-container-toolkit, pkg/nvcdi/driver-wsl.go).
_WSL_DRIVERS = "usr/lib/wsl/drivers"
_CONTROL = "dev/nvidiactl"

_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_MODEL = re.compile(r"^Model:\s*(\S.*?)\s*$", re.MULTILINE)
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([^'\"]*)['\"])", re.MULTILINE)


def probe(root: Path = Path("/"), torch_folder: Path | None = None) -> Probe:
    """Look at files, and import nothing.

    Args:
        root: where /dev, /proc, /sys and /usr are found.
        torch_folder: the installed torch package; None looks for it.
    """
    nodes, on_bus = _device_files(root), pci_devices(root, _VENDOR, _DISPLAY_CLASS)
    listed = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    notes = []
    if on_bus and not nodes:
        notes.append(
            "the GPUs have no /dev/nvidia* files yet: a container needs them handed in, elsewhere "
            "nvidia-modprobe makes them at first use"
        )
    # A container sees every GPU on the bus, but has files of those alone that it was given.
    count = len(nodes) or len(listed) or len(on_bus) or None
    return Probe(
        devices=_devices(root, nodes, listed, on_bus),
        driver=_driver(root),
        software=_software(torch_folder),
        device_count=count,
        notes=tuple(notes),
        cards=_models(root),
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of the loaded kernel driver, such as ``550.54.15``; None if there is none."""
    loaded = file_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    of_module = file_text(root / "sys/module/nvidia/version")
    match = _VERSION.search(loaded) or _VERSION.search(of_module)
    return match.group(1) if match else None


def torch_cuda_version(torch_folder: Path) -> str | None:
    """The CUDA version that an installed torch was built for; None if for none."""
    match = _TORCH_CUDA.search(file_text(torch_folder / "version.py"))
    return match.group(1) if match else None


def _devices(root: Path, nodes: list[str], listed: list[str], on_bus: list[str]) -> Finding:
    looked = ("/sys/bus/pci/devices", "/proc/driver/nvidia/gpus", "/dev/nvidia*", f"/{_WSL_DEVICE}")
    if nodes:
        return Finding.yes(f"{count_of(nodes, _GPU)} ({', '.join(nodes)})", *looked)
    if listed:
        return Finding.yes(f"{count_of(listed, _GPU)} known to the driver", *looked)
    if on_bus:
        return Finding.yes(f"{count_of(on_bus, _GPU)} on the PCI bus", *looked)
    if _is_wsl(root):
        return Finding.yes("GPUs of the Windows host, through WSL", *looked)
    return Finding.no("no NVIDIA GPU", *looked)


def _driver(root: Path) -> Finding:
    files = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")
    looked = (*files, f"/{_WSL_LIBRARIES}", f"/{_CONTROL}")
    version = driver_version(root)
    if version:
        return Finding.yes(f"NVIDIA driver {version}", *looked)
    if _is_wsl(root):
        return Finding.yes("the Windows host's driver", *looked)
    if (root / _CONTROL).exists() and not any((root / "sys/module").glob("*")):
        # gVisor hands the driver's device files in, and neither /proc nor /sys of the host: its
        # /sys/module is empty. Elsewhere such files outlive a driver that was unloaded.
        return Finding.yes("an NVIDIA driver of a version that is not shown here", *looked)
    return Finding.no("the NVIDIA kernel driver is not loaded", *looked)


def _software(torch_folder: Path | None) -> Finding:
    folder = torch_folder or _installed_torch()
    if folder is None:
        return Finding.no("torch is not installed", "torch")
    path = folder / "version.py"
    version = torch_cuda_version(folder)
    if version is None:
        return Finding.no(
            "the installed torch is built without CUDA (pytorch.org/get-started: choose CUDA)",
            str(path),
        )
    return Finding.yes(f"torch is built for CUDA {version}", str(path))


def _installed_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def _device_files(root: Path) -> list[str]:
    names = (path.name for path in (root / "dev").glob("nvidia*"))
    found = [name for name in names if re.fullmatch(r"nvidia\d+", name)]
    return sorted(found, key=lambda name: int(name.removeprefix("nvidia")))


def _models(root: Path) -> tuple[str, ...]:
    """Names of the models, as the driver lists them (NVIDIA's README, "Using the /proc File System
    Interface")."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found = (_MODEL.search(file_text(file)) for file in files)
    return tuple(dict.fromkeys(match.group(1) for match in found if match))


def _is_wsl(root: Path) -> bool:
    # /dev/dxg alone serves other vendors' GPUs too.
    return (root / _WSL_DEVICE).exists() and any(
        any((root / folder).glob(pattern))
        for folder, pattern in ((_WSL_LIBRARIES, "libcuda.so*"), (_WSL_DRIVERS, "*/libcuda.so*"))
    )
