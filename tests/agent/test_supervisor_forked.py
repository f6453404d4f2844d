"""All that is asked of ranks under an agent, asked of ranks that are forks of one process."""

from __future__ import annotations

import pytest

from tests.agent.fake_agent import FORKED
from tests.agent.test_supervisor import *  # noqa: F403

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORKED, "[]")
