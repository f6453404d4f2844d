"""The device is loaded once for all tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("ANYGAUGE_SIM_CARDS", "2")
os.environ.setdefault("ANYGAUGE_SIM_CAPACITY", str(2**28))
# This process holds cards for its whole life; those that tests start must not wait for it.
os.environ["ANYGAUGE_SIM_LOCKS"] = ""


@pytest.fixture(scope="session")
def sim() -> Any:
    """``torch.sim``."""
    from anygauge_sim.device import load

    return load()


@pytest.fixture(autouse=True)
def first_card(sim: Any) -> None:
    """Each test begins on card 0, with counters at zero."""
    sim.set_device(0)
    sim.reset_counters()
    sim.reset_peak_memory_stats()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For runs, and what they need."""
    return tmp_path_factory.mktemp("runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the kit, whatever trains: `test_training` compares cards with the host every day."""
    for item in items:
        if item.path.name == "test_conformance.py" and "runs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
