"""Which of the kit's runs are slow."""

from __future__ import annotations

import pytest

EVERY_DAY = ("test_trains_as_the_host_does[float32]", "test_zero_trains_as_one_process_does[2]")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the kit, whatever trains, but for one run of each kind; graphs have runs of their own."""
    for item in items:
        trains = "runs" in getattr(item, "fixturenames", ())
        if item.path.name == "test_conformance.py" and trains and item.name not in EVERY_DAY:
            item.add_marker(pytest.mark.slow)
