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


def test_open_backend_opens_and_closes(install, backend_source, monkeypatch):
    monkeypatch.setenv("ANYGAUGE_BLOCK_PLUGINS", ",".join(SHIPPED))
    source = backend_source("mine", factory="fake_mine:Recording", more=RECORDING)
    install("mine-dist", "1.0", {"mine": "fake_mine"}, fake_mine=source)
    with anygauge.open_backend("auto", local_rank=3, options={"threads": 1}) as backend:
        assert backend.name == "mine"
        assert backend.options.threads == 1
        assert backend.events == [("open", 3)]
    assert backend.events == [("open", 3), "close"]


def test_open_backend_needs_the_device(install, backend_source, monkeypatch):
    monkeypatch.setenv("ANYGAUGE_BLOCK_PLUGINS", ",".join(SHIPPED))
    source = backend_source("mine", devices="no")
    install("mine-dist", "1.0", {"mine": "fake_mine"}, fake_mine=source)
    with pytest.raises(NotAvailableError, match="card no"):
        anygauge.open_backend("mine")


def test_version_and_unknown_attributes():
    assert anygauge.__version__ == importlib.metadata.version("anygauge")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = anygauge.no_such_thing


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "import anygauge",
        "import anygauge; anygauge.__version__",
        "from anygauge.registry import Registry; r = Registry.load(); r.probe_all(); "
        "import anygauge.kernels.choose",
        "from anygauge.cli.listings import backends; backends(json_=True); backends(json_=False)",
    ],
)
def test_nothing_heavy_is_imported(code):
    heavy = "{'torch', 'transformers', 'deepspeed', 'peft'}"
    if "registry" not in code and "cli" not in code:
        heavy = "{'torch', 'transformers', 'deepspeed', 'peft', 'pydantic', 'pluggy', 'rich'}"
    result = run(f"{code}\nimport sys\nfound = {heavy} & set(sys.modules)\nassert not found, found")
    assert result.returncode == 0, result.stderr
