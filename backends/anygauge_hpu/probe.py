"""What a machine has for the backend: Gaudi cards, which modules they are, driver and software.

Files and installed metadata only; nothing is imported.

``/dev/accel`` belongs to the kernel's accelerator subsystem, which other vendors' chips use, too:
a device file counts only if the PCI device behind it is Habana's.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from anygauge.interface import Finding, Probe, count_of, file_text, installed_version, pci_devices

VENDOR = "0x1da3"
"""Habana Labs' PCI vendor id."""

PLUGIN = "habana-torch-plugin"
"""The distribution that brings the device to torch. It comes with Intel's image or from Intel's
own archive; it is on no public package index."""

PACKAGE = "habana_frameworks"

_CARD = "Gaudi card"


def probe(root: Path = Path("/"), software: str | None = None) -> Probe:
    """Look at files, and import nothing.

    Args:
        root: where /dev and /sys are found.
        software: version of the installed plugin; None looks for it.
    """
    nodes, on_bus = _device_files(root), pci_devices(root, VENDOR)
    notes = []
    if on_bus and not nodes:
        notes.append(
            "the cards have no /dev/accel/accel* files: load the driver, or in a container hand "
            "them in (--runtime=habana -e HABANA_VISIBLE_DEVICES=all)"
        )
    return Probe(
        devices=_devices(nodes, on_bus),
        driver=_driver(root),
        software=_software(software),
        # A container sees every card on the bus, but has files of those alone that it was given.
        device_count=len(nodes) or len(on_bus) or None,
        notes=tuple(notes),
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of the loaded kernel driver; None if it is not loaded."""
    return file_text(root / "sys/module/habanalabs/version") or None


def why_missing() -> str | None:
    """Why Gaudi's software cannot be used here, or None; for kernels."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed: it comes with Intel's container image"
    return None


def is_fork(torch_version: str) -> bool:
    """Whether a torch is Intel's own build, which lazy mode needs: its local part says so.

    Source: gaudi-pytorch-bridge 1.19.0, habana_frameworks/torch/__init__.py, for ``git``; later
    releases report themselves as ``2.6.0+hpu_1.20.0-543.git4952fce``, too.
    """
    return torch_version.partition("+")[2].startswith(("git", "hpu"))


def _devices(nodes: list[str], on_bus: list[str]) -> Finding:
    looked = (f"/sys/bus/pci/devices (vendor {VENDOR})", "/dev/accel/accel*", "/sys/class/accel")
    if nodes:
        return Finding.yes(f"{count_of(nodes, _CARD)} ({', '.join(nodes)})", *looked)
    if on_bus:
        return Finding.yes(f"{count_of(on_bus, _CARD)} on the PCI bus", *looked)
    return Finding.no(f"no Gaudi card (PCI vendor {VENDOR})", *looked)


def _driver(root: Path) -> Finding:
    looked = ("/sys/module/habanalabs/version",)
    version = driver_version(root)
    if version:
        return Finding.yes(f"driver habanalabs {version}", *looked)
    return Finding.no("the kernel driver habanalabs is not loaded", *looked)


def _software(stated: str | None) -> Finding:
    looked = (PACKAGE, PLUGIN)
    version = stated or installed_version(PLUGIN)
    if version is None and importlib.util.find_spec(PACKAGE) is None:
        return Finding.no(
            f"Gaudi's software ({PLUGIN}) is not installed; it comes with Intel's container image",
            *looked,
        )
    return Finding.yes(f"{PLUGIN} {version or 'of unknown version'}", *looked)


def _device_files(root: Path) -> list[str]:
    """Device files of this vendor's cards, by number; the node's parent tells whose it is."""
    found = []
    for path in (root / "dev/accel").glob("accel*"):
        number = path.name.removeprefix("accel")
        vendor = file_text(root / "sys/class/accel" / path.name / "device/vendor")
        if number.isdigit() and vendor == VENDOR:
            found.append(path.name)
    return sorted(found, key=lambda name: int(name.removeprefix("accel")))


# -- modules ----------------------------------------------------------------------------------
#
# The kernel numbers device files as it finds cards (``accel0``). Gaudi's library takes a card by
# its module: the place on the board where it sits. The two need not agree, and a container may have
# any of the cards. Source: Linux, Documentation/ABI/testing/sysfs-driver-habanalabs, ``module_id``.

DEVICE_FILES = "/dev/accel/accel*"
MODULE_FILES = "/sys/class/accel/accel*/device/module_id"
PATTERNS = (DEVICE_FILES, MODULE_FILES)
"""Files that say which modules a machine or container has."""


def modules_here(texts: Mapping[str, str]) -> tuple[str, ...] | None:
    """Module numbers of the cards that have a device file, in ascending order.

    Args:
        texts: path -> text of the files of `PATTERNS`; the text of a device file is not read.

    Returns:
        None where there is no card, or the driver does not say the module of each.
    """
    cards = {m[1] for path in texts if (m := re.fullmatch(r"/dev/accel/(accel\d+)", path))}
    found = {card: texts.get(MODULE_FILES.replace("accel*", card), "").strip() for card in cards}
    # Chips of other vendors have device files of this kind, but no module.
    numbers = sorted(int(text) for text in found.values() if text.isdigit())
    if not numbers or len(set(numbers)) < len(numbers):
        return None
    return tuple(map(str, numbers))
