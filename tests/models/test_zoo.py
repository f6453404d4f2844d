"""Architectures, one of each kind, come through, and nothing in the table of all is unexplained."""

from __future__ import annotations

import pytest

from docs.make_docs import UNEXPLAINED, architectures
from tests.models.zoo import STACK, STORED, result


@pytest.mark.parametrize("name", STORED["kinds"])
def test_one_of_each_kind_comes_through(name: str) -> None:
    row = result(name)
    assert "failed" not in row, row
    assert row == STORED["stacks"][STACK]["rows"][name]


def test_the_results_are_of_these_versions_and_explained() -> None:
    """A release of transformers that is not among them has other models: run `make zoo`."""
    assert STACK in STORED["stacks"]
    assert UNEXPLAINED not in architectures()
