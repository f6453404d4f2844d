"""The device is part of torch: all there is to look for is torch."""

from __future__ import annotations

from importlib.util import find_spec

from anygauge.interface import Finding, Probe


def probe() -> Probe:
    """Look for torch without importing it."""
    found = find_spec("torch")
    return Probe(
        devices=Finding.not_needed("tensors of the host, evaluated lazily"),
        driver=Finding.not_needed("tensors of the host, evaluated lazily"),
        software=Finding.yes("torch with its TorchScript lazy backend", str(found.origin))
        if found
        else Finding.no("torch is not installed", "torch"),
        device_count=1 if found else 0,
    )
