from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton asks once, when it is imported. Without a GPU, its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes to the home folder, nor finds rows that a test of another day left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYGAUGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
