"""What a run's strategy is refused for, before a device is opened."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.interface import (
    API_VERSION,
    FULL,
    Level,
    Requirement,
    RunFileError,
    StrategySpec,
    Support,
    UnsupportedError,
)
from anygauge.registry import Registry
from anygauge.training.strategy import check_backend, check_ranks

SPEC = StrategySpec(
    name="mine",
    factory="mine:Mine",
    api_version=API_VERSION,
    needs=(Requirement(capability="collectives", because="it shards"),),
    engine="turbine",
)


def toy(support: Support = FULL, engines: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(
        name="toy", support=lambda capability: support, unsupported_engines=engines or {}
    )


def test_a_device_that_lacks_what_it_needs_is_named_with_the_reason() -> None:
    check_backend(SPEC, toy())
    lacking = toy(Support(Level.NOT_WRITTEN_YET, "one card only"))
    with pytest.raises(UnsupportedError, match=r"'toy' lacks 'collectives'.*one card only"):
        check_backend(SPEC, lacking)
    check_backend(dataclasses.replace(SPEC, needs=()), lacking)


def test_an_engine_that_a_device_cannot_run_is_named_with_the_reason() -> None:
    refusing = toy(engines={"turbine": "no steam here"})
    with pytest.raises(UnsupportedError, match=r"'toy' cannot run 'turbine'.*no steam here"):
        check_backend(SPEC, refusing)
    check_backend(dataclasses.replace(SPEC, engine="another"), refusing)
    check_backend(dataclasses.replace(SPEC, engine=""), refusing)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((1,), "in one process, but 3 ranks are asked for; use --devices 1 and --nodes 1"),
        ((2, 4), "in 2 or 4 ranks, but 3 ranks are asked for; make --devices times --nodes 2 or 4"),
    ],
)
def test_a_number_of_ranks_that_it_does_not_run_on(sizes: tuple[int, ...], told: str) -> None:
    registry = Registry.load()
    check_ranks(SPEC, 3, registry)
    spec = dataclasses.replace(SPEC, world_sizes=sizes)
    check_ranks(spec, sizes[0], registry)
    with pytest.raises(RunFileError, match=f"{told}, or strategy.name: zero"):
        check_ranks(spec, 3, registry)
