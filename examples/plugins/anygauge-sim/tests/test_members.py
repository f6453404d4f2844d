"""How little a device that torch knows has to say: the proof that the defaults carry."""

from __future__ import annotations

from anygauge_sim.backend import SimBackend

from anygauge.interface import Backend, Collectives, Graph, Placement

MOST = 6


def overridden() -> list[str]:
    """Members of the contract that the plugin defines, but for its name."""
    pairs = (
        (SimBackend, Backend),
        (SimBackend.placement_class, Placement),
        (SimBackend.graph_class, Graph),
        (SimBackend.collectives_class, Collectives),
    )
    known = [set(dir(base)) | set(base.__annotations__) for _, base in pairs]
    return [
        f"{own.__name__}.{name}"
        for (own, base), names in zip(pairs, known, strict=True)
        if own is not base
        for name in vars(own)
        if name in names and name != "name" and (not name.startswith("__") or name == "__init__")
    ]


def test_six_members_or_fewer() -> None:
    found = overridden()
    assert "SimPlacement.open" in found and "SimBackend.capabilities" in found
    assert len(found) <= MOST, found
