"""With broken plugins beside it the tool works as before, and says whose each is and why."""

from __future__ import annotations

import json
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
FAILED = "the plugin '{0}' of {0}-dist 0.3 failed to load"
BROKEN: dict[str, tuple[Any, str, str]] = {
    "missing": (
        "import no_such_module",
        "ModuleNotFoundError: No module named 'no_such_module'",
        f"{FAILED}: ModuleNotFoundError",
    ),
    "old": (
        OF_OLD,
        "got an unexpected keyword argument 'fidelity' (fake_old.py, line 7). If the plugin was "
        "written for another anygauge, install a release of it made for this one",
        FAILED,
    ),
    "hangs": (
        {"probe": "import time; time.sleep(3600)"},
        "the probe has not answered for 0.2 s; this is a fault of hangs-dist 0.3",
        "the probe has not answered for 0.2 s; this is a fault of hangs-dist 0.3",
    ),
    "angry": (
        {"factory": "fake_angry:Angry", "more": ANGRY},
        "angry-dist",
        "backend 'angry' of angry-dist 0.3: environment() raised KeyError: 'no such node'",
    ),
    "cuda": ({"plugin": "rival", "devices": "no"}, "rival-dist 0.3 (plugin 'rival')", "rival-dist"),
}
"""Name -> its source or what is wrong with a backend; what the list says; what who chooses it is
told."""


@pytest.fixture(autouse=True)
def broken(install: Any, have: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "PROBE_LIMIT_S", 0.2)
    for name, (fault, _, _) in BROKEN.items():
        if isinstance(fault, dict):
            have(name, **{"version": "0.3", "priority": -5, **fault})
        else:
            install(f"{name}-dist", "0.3", {name: f"fake_{name}"}, **{f"fake_{name}": fault})


def test_the_others_work_and_the_list_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert {b["name"] for b in report["backends"] if b["available"]} >= {"cpu"}
    assert report["auto"]["chosen"] is not None
    assert run(["backends"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, (_, told, _) in BROKEN.items():
        assert told in text and (name in shown or name == "cuda"), name
    assert run(["env", "--backend", "cpu", "--devices", "2"]) == 0
    assert "OMP_NUM_THREADS" in capsys.readouterr().out


@pytest.mark.parametrize("name", BROKEN)
def test_who_chooses_it_is_told(name: str) -> None:
    with pytest.raises(AnygaugeError) as caught:
        run(["env", "--backend", name, "--devices", "2"])
        select_backend(Registry.load(), name)  # `env` needs no device, hence asks no probe
    assert BROKEN[name][2].format(name) in " ".join(str(caught.value).split())
