"""What holds for every backend that is shipped: the kit's checks on paper, and who names what."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.testing.check import CHECKS
from anygauge.testing.paper import Paper
from anygauge.testing.process import import_checks
from tests.architecture.repository import ROOT
from tests.helpers.plans_from_options import backend_with, registry
from tests.helpers.sample_machines import assert_pure, by_name, job, machine

import_checks("basic")
SHIPPED = sorted(one.spec.name for one in registry().backends if one.distribution == "anygauge")
OPTIONS: dict[str, dict[str, Any]] = {name: {} for name in SHIPPED} | {"hpu": {"mode": "lazy"}}
ON_PAPER = (
    *("described", "options_are_checked", "probe_is_pure"),
    *("settings_are_sound", "scopes_hold", "rules_hold_on_any_machine"),
    "light_construction",
)
"""Of the kit's checks those that take no time; all of them are for `make test-kit`."""


@pytest.mark.parametrize("check", ON_PAPER)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_kits_checks_on_paper(name: str, check: str) -> None:
    CHECKS[check].function(Paper(name=name, options=OPTIONS[name], registry=registry()))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_rule_has_a_reason_and_a_source(name: str) -> None:
    for rule in backend_with(name, OPTIONS[name]).environment_rules:
        assert rule.reason and rule.source and rule.value


@pytest.mark.parametrize("name", OPTIONS)
def test_rules_open_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_with(name, OPTIONS[name])
    for nodes in (1, 2):
        two = job(nodes=nodes, devices=2, backend_options=OPTIONS[name])
        for rank in (None, 0, 1):
            assert_pure(lambda: backend.environment(two, machine(), rank), monkeypatch)  # noqa: B023


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_without_torch_the_probe_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = registry().find_backend(name).spec.probe
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = probe()
    assert not found.available and "torch is not installed" in found.reason


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_where_a_reader_looks(name: str) -> None:
    spec = registry().find_backend(name).spec
    assert spec.factory == f"anygauge_{name}.backend:{name.capitalize()}Backend"
    assert spec.hardware == f"anygauge_{name}:device.toml"
    assert spec.priority == (0 if name == "cpu" else 100)
    files = {path.name for path in (ROOT / f"backends/anygauge_{name}").iterdir()}
    assert files >= {"__init__.py", "backend.py", "probe.py", "device.toml"}


@pytest.mark.parametrize("name", ["cpu", "cuda", "hpu"])
def test_deepspeed_knows_it_by_its_name(name: str) -> None:
    backend = backend_with(name, {})
    assert by_name(backend.engine_settings("deepspeed"))["accelerator"].value == name
    assert backend.engine_settings("another") == ()
