"""Files that are written here: whole or not at all, with the modes that they should have."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from anygauge.util.files import usual_mode, write_text


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_text(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_usual_mode_is_that_of_a_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
    finally:
        os.umask(before)
    mode = (tmp_path / "folder" / "file").stat().st_mode
    assert usual_mode(tmp_path / "folder") == stat.S_IMODE(mode)
