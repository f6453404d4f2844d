"""With a broken plugin beside it the tool works as before, and says whose it is and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from anygauge.cli import run
from anygauge.interface import AnygaugeError
from anygauge.registry import Registry, select_backend, specs

OF_OLD = """
from anygauge.interface import LauncherSpec, hookimpl

@hookimpl
def anygauge_provide_launchers():
    fields = {"name": "bad", "factory": "fake_bad:Bad", "api_version": 0, "fidelity": "real"}
    return [LauncherSpec(**fields)]
"""
ANGRY = """
class Angry(Fake):
    def environment(self, job, node, local_rank=None):
        raise KeyError("no such node")
"""
BROKEN: dict[str, dict[str, Any]] = {
    "cannot be imported": {"source": "import no_such_module"},
    "gives a field of old": {"source": OF_OLD},
    "claims a name twice": {"name": "cuda", "devices": "no"},
    "has a probe that hangs": {"probe": "import time; time.sleep(3600)"},
    "has an environment that raises": {"factory": "fake_bad:Angry", "more": ANGRY},
}
IN_THE_LIST = {
    "cannot be imported": "ModuleNotFoundError: No module named 'no_such_module'",
    "gives a field of old": "got an unexpected keyword argument 'fidelity' (fake_bad.py, line 7). "
    "If the plugin was written for another anygauge, install a release of it made for this one",
    "claims a name twice": "bad-dist 0.3 (plugin 'bad')",
    "has a probe that hangs": "the probe has not answered for 0.2 s; "
    "this is a fault of bad-dist 0.3",
}
WHEN_CHOSEN = IN_THE_LIST | {
    "cannot be imported": "the plugin 'bad' of bad-dist 0.3 failed to load: ModuleNotFoundError",
    "gives a field of old": "the plugin 'bad' of bad-dist 0.3 failed to load",
    "has an environment that raises": "backend 'bad' of bad-dist 0.3: environment() raised "
    "KeyError: 'no such node'",
}


def strings(report: Any) -> str:
    """All texts of a JSON report, one behind the other."""
    if isinstance(report, dict):
        report = list(report.values())
    if isinstance(report, list):
        return " ".join(map(strings, report))
    return str(report)


@pytest.fixture
def put(install: Any, backend_source: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Installs the plugin with one fault, beside what is installed here; returns its name."""
    monkeypatch.setattr(specs, "PROBE_LIMIT_S", 0.2)

    def putting(fault: str) -> str:
        settings = {"name": "bad", "module": "fake_bad", "priority": -5, **BROKEN[fault]}
        source = settings.pop("source", None) or backend_source(**settings)
        install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad=source)
        return str(settings["name"])

    return putting


@pytest.mark.parametrize("fault", BROKEN)
def test_the_others_work_and_the_list_tells(
    fault: str, put: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(fault)
    assert run(["backends", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    host = next(b for b in report["backends"] if b["name"] == "cpu")
    assert host["available"]
    assert report["auto"]["chosen"] is not None
    assert IN_THE_LIST.get(fault, "bad-dist") in strings(report)
    assert run(["backends"]) == 0
    assert "bad-dist 0.3" in " ".join(capsys.readouterr().out.split())
    assert run(["env", "--backend", "cpu", "--devices", "2"]) == 0
    assert "OMP_NUM_THREADS" in capsys.readouterr().out


@pytest.mark.parametrize("fault", BROKEN)
def test_who_chooses_it_is_told(fault: str, put: Callable[[str], str]) -> None:
    name = put(fault)
    with pytest.raises(AnygaugeError) as caught:
        run(["env", "--backend", name, "--devices", "2"])
        select_backend(Registry.load(), name)  # `env` needs no device, hence asks no probe
    text = " ".join(str(caught.value).split())
    assert WHEN_CHOSEN[fault] in text
    assert "bad-dist 0.3" in text
