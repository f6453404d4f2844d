"""What ``pytest --anygauge-backend NAME`` collects: the contract for that backend."""

from __future__ import annotations

import os

from anygauge.testing.contract import BackendContract
from anygauge.testing.plugin import CHOSEN


class TestBackend(BackendContract):
    """The backend that the command line names."""

    backend = os.environ[CHOSEN]
