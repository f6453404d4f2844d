"""Which of the kit's runs are slow."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the kit's runs one of each kind is for every day."""
    for item in items:
        if item.name == "test_zero_trains_as_one_process_does[4]":
            item.add_marker(pytest.mark.slow)
