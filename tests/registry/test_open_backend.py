"""`anygauge.open_backend` for a loop of one's own, and what importing anygauge costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import anygauge
from anygauge.interface import NotAvailableError
from tests.registry.conftest import SHIPPED

RECORDING = """
class Recording(Fake):
    def open(self, local_rank=0):
        self.events = [("open", local_rank)]

    def close(self):
        self.events.append("close")
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("ANYGAUGE_BLOCK_PLUGINS", ",".join(SHIPPED))


def test_open_backend_opens_and_closes(have):
    have("mine", factory="fake_mine:Recording", more=RECORDING)
    with anygauge.open_backend("auto", local_rank=3, options={"threads": 1}) as backend:
        assert (backend.name, backend.options.threads) == ("mine", 1)
        assert backend.events == [("open", 3)]
    assert backend.events == [("open", 3), "close"]


def test_open_backend_needs_the_device(have):
    have("mine", devices="no")
    with pytest.raises(NotAvailableError, match="card no"):
        anygauge.open_backend("mine")


def test_version_and_unknown_attributes():
    assert anygauge.__version__ == importlib.metadata.version("anygauge")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = anygauge.no_such_thing


def test_importing_it_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'deepspeed', 'peft', 'pydantic', 'pluggy', 'rich'}"
    use = "import anygauge, sys; anygauge.__version__, anygauge.open_backend"
    code = f"{use}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
