"""What is done by a copy of the process, and that it leaves none behind."""

from __future__ import annotations

import os
import time

import pytest

from anygauge.planning.run import Aside


def test_what_it_found_comes_back_however_large() -> None:
    here = os.getpid()
    aside = Aside(lambda: (os.getpid() != here, b"x" * 1_000_000))
    assert aside.result() == (True, b"x" * 1_000_000)


def test_what_fails_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ValueError("no layers")

    assert Aside(fails).result() is None
    assert "no layers" in capfd.readouterr().err


def test_what_nobody_asks_for_is_ended() -> None:
    aside = Aside(lambda: time.sleep(600))
    began = time.monotonic()
    aside.drop()
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(aside._pid, 0)


def test_it_ends_with_the_process_that_asked() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        Aside(lambda: time.sleep(600))  # has `write`, too
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"", "all that could write are gone"
    os.close(read)
