"""A named backend never falls back; `auto` states its reasons and leaves no device idle."""

from __future__ import annotations

import re

import pytest

from anygauge.interface import NotAvailableError, PluginError, RunFileError, UnknownNameError
from anygauge.registry import select_backend
from anygauge.registry.specs import load_factory, load_options, refuse_if_missing

HOST = {"priority": 0, "devices": "not_needed"}
GONE = {"fake_gone": "import no_such_module"}

# -- chosen --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "asked", "chosen", "reasons"),
    [
        (
            {"host": HOST, "fast": {"priority": 50}},
            "host",
            "host",
            {"fast": "backend 'host' was asked for by name"},
        ),
        (
            {"host": HOST, "low": {}, "high": {"priority": 20}, "absent": {"devices": "no"}},
            "auto",
            "high",
            {
                "low": "priority 10 is below the 20 of 'high'",
                "host": "priority 0 is below the 20 of 'high'",
                "absent": "device: card no",
            },
        ),
        ({"beta": {}, "alpha": {}}, "auto", "alpha", {"beta": "same priority"}),
        (
            {"host": HOST, "fast": {"devices": "no", "driver": "no"}},
            "auto",
            "host",
            {"fast": "device: card no; driver: driver no"},
        ),
        (
            {"host": HOST, "fast": {"priority": 20, "software": "no"}, "other": {}},
            "auto",
            "other",
            {"fast": "software: library no"},
        ),
    ],
    ids=["by name", "the highest priority", "the first name", "the host", "a device that works"],
)
def test_one_is_taken_and_the_others_have_reasons(have, load, installed, asked, chosen, reasons):
    for name, answers in installed.items():
        have(name, **answers)
    selection = select_backend(load(), asked)
    assert (selection.spec.name, selection.probe.available) == (chosen, True)
    assert selection.provided.origin == f"{chosen}-dist 1.0"
    rejected = dict(selection.rejected)
    assert all(reason in rejected[name] for name, reason in reasons.items()), rejected


@pytest.mark.parametrize("asked", ["fast", "auto"])
def test_where_no_rank_is_started_a_device_may_be_idle(have, load, asked):
    have("host", **HOST)
    have("fast", software="no")
    selection = select_backend(load(), asked, need_device=False)
    assert (selection.spec.name, selection.probe.available) == ("fast", False)
    assert asked == "fast" or "'fast' has devices" in dict(selection.rejected)["host"]


def test_auto_names_what_it_could_not_probe(have, install, load):
    have("host", **HOST)
    have("shut")
    install("gone-dist", "3.1", {"gone": "fake_gone"}, **GONE)
    reasons = dict(select_backend(load("shut"), "auto").rejected)
    assert re.search("could not be probed.*no_such_module", reasons["gone"])
    assert "blocked" in reasons["shut"]


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "asked", "error", "texts"),
    [
        (
            {"host": HOST, "fast": {"devices": "no", "software": "no"}},
            "fast",
            NotAvailableError,
            [
                "(fast-dist 1.0)",
                "device: no: card no (looked at /fake/card)",
                "driver: yes",
                "software: no: library no (looked at /fake/library)",
                "available here: host",
            ],
        ),
        (
            {"host": {}},
            "hots",
            UnknownNameError,
            ["did you mean 'host'?", "valid names: auto, host"],
        ),
        (
            {"host": HOST, "fast": {"software": "no"}},
            "auto",
            NotAvailableError,
            ["fast (fast-dist 1.0): card yes", "software: library no", "--backend host"],
        ),
        ({}, "auto", NotAvailableError, ["no backend is available on this machine"]),
        ({"fast": {"devices": "no"}}, "auto", NotAvailableError, ["fast: device: card no"]),
    ],
    ids=["by name", "unknown", "idle devices", "none installed", "none available"],
)
def test_a_refusal_says_why(have, load, installed, asked, error, texts):
    for name, answers in installed.items():
        have(name, **answers)
    with pytest.raises(error) as caught:
        select_backend(load(), asked)
    assert [text for text in texts if text not in str(caught.value)] == []


def test_a_name_of_a_plugin_that_failed_or_is_blocked_says_so(have, install, load):
    have("host")
    install("gone-dist", "3.1", {"gone": "fake_gone"}, **GONE)
    with pytest.raises(PluginError, match=r"gone-dist 3.1 failed to load: .*no_such_module"):
        select_backend(load(), "gone")
    with pytest.raises(PluginError, match=r"host-dist 1\.0 is blocked by ANYGAUGE_BLOCK_PLUGINS"):
        select_backend(load("host"), "host")


def test_auto_counts_the_devices_of_a_name_claimed_twice(have, load):
    have("host", **HOST)
    have("twin", plugin="one")
    have("twin", plugin="two", version="2.0")
    with pytest.raises(NotAvailableError, match=r"one-dist 1.0 .* and two-dist 2.0"):
        select_backend(load(), "auto")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('no permission')", "the probe raised OSError: no permission"),
        ("return True", "the probe gave True, which is not a Probe"),
    ],
)
def test_broken_probe_is_an_unavailable_backend(have, load, body, reason):
    have("host", **HOST)
    have("fast", probe=body)
    registry = load()
    why = dict(select_backend(registry, "auto").rejected)["fast"]
    assert reason in why and "this is a fault of fast-dist 1.0" in why
    with pytest.raises(NotAvailableError, match="fault of fast-dist"):
        select_backend(registry, "fast")


# -- made ----------------------------------------------------------------------------------------


def test_create_what_was_selected(have, load):
    have("host")
    registry = load()
    for asked in ("host", "auto"):
        chosen = select_backend(registry, asked).spec.name
        backend = registry.create_backend(chosen, {"threads": 2})
        assert (backend.name, backend.options.threads) == ("host", 2)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("fake_host:FakeOptions.model_validate", "gave a FakeOptions, not an anygauge.interface.B"),
        ("fake_host:Renamed", "whose name is 'another'"),
        ("fake_host:Promising", "capabilities have 'bfloat16': True, which is not an"),
        ("fake_host:broken", "raised RuntimeError: no such card"),
        ("fake_host:API_VERSION", "is a int, which cannot be called"),
        ("fake_host:Absent", "AttributeError"),
        ("fake_nowhere:Fake", "ModuleNotFoundError"),
    ],
)
def test_factory_of_the_wrong_kind(have, load, factory, reason):
    have("host", factory=factory)
    with pytest.raises(PluginError) as caught:
        load().create_backend("host")
    assert reason in str(caught.value)
    assert "host-dist 1.0" in str(caught.value)


def test_what_a_backend_says_of_its_options_reaches_the_user(have, load):
    more = "def picky(options): raise RunFileError('backend_options.threads: too many')"
    have("host", factory="fake_host:picky", more=more)
    with pytest.raises(RunFileError, match="too many"):
        load().create_backend("host", {"threads": 3})


# -- the other kinds -----------------------------------------------------------------------------

OTHERS = """
from anygauge.interface import hookimpl, API_VERSION, LauncherSpec, StrategySpec, TrackerSpec

class Launch: ...

@hookimpl
def anygauge_provide_launchers():
    return [LauncherSpec(
        name="near", factory="fake_others:Launch", api_version=API_VERSION, tested_on="real")]

@hookimpl
def anygauge_provide_strategies():
    for name in ("nowhere", "fake_others"):
        yield StrategySpec(
            name=name, factory="fake_others:Launch", api_version=API_VERSION,
            options=f"{name}:Launch")

@hookimpl
def anygauge_provide_trackers():
    yield TrackerSpec(name="board", factory="fake_others:Launch", api_version=API_VERSION)
    yield TrackerSpec(
        name="lacking", factory="fake_others:Launch", api_version=API_VERSION,
        missing=lambda: "package 'boards' is not installed")
    yield TrackerSpec(name="broken", factory="fake_others:gone", api_version=API_VERSION)
"""
OF = r"of others-dist 1\.0"


def test_launchers_strategies_and_trackers_by_name(install, load):
    install("others-dist", "1.0", {"others": "fake_others"}, fake_others=OTHERS)
    registry = load()
    assert registry.launcher("near").__name__ == "Launch"
    assert load_factory(registry.find_tracker("board")).__name__ == "Launch"
    tracker, strategy = registry.find_tracker, registry.find_strategy
    for use, found, text in (
        (registry.launcher, "nera", r"no launcher named 'nera'; did you mean 'near'\?"),
        (tracker, "near", "valid names: board, broken, lacking"),
        (refuse_if_missing, tracker("lacking"), f"'lacking' {OF} cannot run here: package 'boards"),
        (load_factory, tracker("broken"), f"tracker 'broken' {OF}: its factory"),
        (load_options, strategy("nowhere"), f"strategy 'nowhere' {OF}: its options .* cannot be l"),
        (load_options, strategy("fake_others"), "is not a class that derives from anygauge"),
    ):
        with pytest.raises(PluginError, match=text):
            use(found)
