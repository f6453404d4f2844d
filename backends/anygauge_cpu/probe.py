"""Is there what this backend needs? Every machine has processors, so only torch is looked for."""

from __future__ import annotations

import importlib.util

from anygauge.interface import Finding, Probe


def probe() -> Probe:
    """Look, and import nothing."""
    return Probe(
        # Not "yes": a processor is not an accelerator that `--backend auto` should have preferred.
        devices=Finding.not_needed("the host's processors"),
        driver=Finding.not_needed(),
        software=_software(),
        cards=("cpu",),
    )


def _software() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding.no("torch is not installed (pip install torch)", "torch")
    return Finding.yes("torch is installed", "torch")
