"""Every layout that a run's ranks can have; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.training.auto import AUTO

DEGREES = ("dp_replicate", "cp", "tp", "pp")
"""Fields of a strategy's options by which ranks are divided; those of third parties too."""
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload": ("optimizer", "parameters", "both"),
}
"""Further fields that decide what a rank holds, with what they may have."""


def layouts(registry: Registry, ranks: int, devices: int) -> Iterator[Mapping[str, Any]]:
    """Sections `strategy` of run files: each strategy as it is, and with each field changed once.

    Args:
        ranks: of the run.
        devices: ranks on one machine: layers and sequences are divided over no more.
    """
    for provided in registry.strategies:
        spec = provided.spec
        if spec.name == AUTO or (spec.world_sizes and ranks not in spec.world_sizes):
            continue
        yield {"name": spec.name}
        options = load_options(provided, "strategy")
        fields = options.model_fields
        for name in DEGREES:
            most = ranks - 1 if name == "dp_replicate" else devices
            for degree in range(2, most + 1):
                if name in fields and ranks % degree == 0:
                    yield {"name": spec.name, name: degree}
        for name, values in CHOICES.items():
            for value in values:
                if (
                    name in fields
                    and fields[name].default != value
                    and _takes(options, name, value)
                ):
                    yield {"name": spec.name, name: value}


def _takes(options: type[BaseModel], name: str, value: Any) -> bool:
    try:
        options.model_validate({name: value})
    except ValidationError:
        return False
    return True


def section_in_words(section: Mapping[str, Any]) -> str:
    """A section in a few words: ``zero, stage 2``."""
    rest = [f"{name} {value}" for name, value in section.items() if name != "name"]
    return ", ".join([section["name"], *rest])
