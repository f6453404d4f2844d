"""Architectures, one of each kind, come through; docs/models.md, which has all, is not old."""

from __future__ import annotations

import pytest

from tests.models.zoo import PAGE, STACK, STORED, UNEXPLAINED, result, tables


@pytest.mark.parametrize("name", STORED["kinds"])
def test_one_of_each_kind_comes_through(name: str) -> None:
    row = result(name)
    assert "failed" not in row, row
    assert row == STORED["stacks"][STACK]["rows"][name]


def test_the_page_is_made_of_the_results_and_names_their_versions() -> None:
    """A release of transformers that is not among them has other models: run `make zoo`."""
    assert STACK in STORED["stacks"]
    page = PAGE.read_text()
    assert page.endswith("\n".join(tables())) and UNEXPLAINED not in page
