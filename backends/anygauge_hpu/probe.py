"""Are there Gaudi cards, is their driver loaded, and is Gaudi's software installed? Files only.

``/dev/accel`` belongs to the kernel's accelerator subsystem, which other vendors' chips use, too:
a device file counts only if the PCI device behind it is Habana's.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from anygauge.interface import Finding, Probe
from anygauge_hpu.software import PACKAGE, PLUGIN, installed_version

VENDOR = "0x1da3"
"""Habana Labs' PCI vendor id."""


def probe(root: Path = Path("/"), software: str | None = None) -> Probe:
    """Look at files, and import nothing.

    Args:
        root: where /dev and /sys are found.
        software: version of the installed plugin; None looks for it.
    """
    nodes, on_bus = _device_files(root), _on_pci_bus(root)
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
    return _text(root / "sys/module/habanalabs/version") or None


def _devices(nodes: list[str], on_bus: list[str]) -> Finding:
    looked = (f"/sys/bus/pci/devices (vendor {VENDOR})", "/dev/accel/accel*", "/sys/class/accel")
    if nodes:
        return Finding.yes(f"{_cards(len(nodes))} ({', '.join(nodes)})", *looked)
    if on_bus:
        return Finding.yes(f"{_cards(len(on_bus))} on the PCI bus", *looked)
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
        vendor = _text(root / "sys/class/accel" / path.name / "device/vendor")
        if number.isdigit() and vendor == VENDOR:
            found.append(path.name)
    return sorted(found, key=lambda name: int(name.removeprefix("accel")))


def _on_pci_bus(root: Path) -> list[str]:
    return sorted(
        path.name
        for path in (root / "sys/bus/pci/devices").glob("*")
        if _text(path / "vendor") == VENDOR
    )


def _cards(count: int) -> str:
    return f"{count} Gaudi card" + ("" if count == 1 else "s")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
