"""The order of files: which come first."""

from __future__ import annotations

from tests.conftest import HERE, LONGEST


def test_the_longest_files_are_there() -> None:
    """A file that has moved would run late again."""
    assert [name for name in LONGEST if not (HERE / name).is_file()] == []
