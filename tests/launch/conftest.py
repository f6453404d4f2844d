"""What several tests of agents need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.child_processes import end
from tests.launch.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Agents that end with the test."""
    one = Cluster(tmp_path)
    yield one
    end(*(agent for agent in one.agents.values() if agent.poll() is None))
