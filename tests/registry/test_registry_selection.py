"""A named backend never falls back; `auto` states its reasons and leaves no device idle."""

from __future__ import annotations

import pytest

from anygauge.interface import NotAvailableError, PluginError, RunFileError
from anygauge.registry import select_backend
from anygauge.registry.specs import load_factory, refuse_if_missing

# -- by name -------------------------------------------------------------------------------------


def test_named_backend_is_taken_whatever_its_priority(have, load):
    have("host", priority=0)
    have("fast", priority=50)
    selection = select_backend(load(), "host")
    assert selection.spec.name == "host"
    assert selection.provided.origin == "host-dist 1.0"
    assert selection.probe.available
    assert dict(selection.rejected) == {"fast": "backend 'host' was asked for by name"}


def test_named_backend_never_falls_back(have, load):
    have("host", priority=0)
    have("fast", devices="no", software="no")
    with pytest.raises(NotAvailableError) as caught:
        select_backend(load(), "fast")
    message = str(caught.value)
    assert "fast-dist 1.0" in message
    assert "device: no: card no (looked at /fake/card)" in message
    assert "driver: yes" in message
    assert "software: no: library no (looked at /fake/library)" in message
    assert "available here: host" in message


def test_named_backend_without_need_of_a_device(have, load):
    have("fast", devices="no")
    selection = select_backend(load(), "fast", need_device=False)
    assert selection.spec.name == "fast"
    assert not selection.probe.available


def test_unknown_name_lists_and_suggests(have, load):
    have("host")
    with pytest.raises(PluginError) as caught:
        select_backend(load(), "hots")
    assert "did you mean 'host'?" in str(caught.value)
    assert "valid names: auto, host" in str(caught.value)
    assert not isinstance(caught.value, NotAvailableError)


def test_unknown_name_of_a_plugin_that_failed_or_is_blocked_says_so(have, install, load):
    have("host")
    install("gone-dist", "3.1", {"gone": "fake_gone"}, fake_gone="import no_such_module")
    with pytest.raises(PluginError, match=r"gone-dist 3.1 failed to load: .*no_such_module"):
        select_backend(load(), "gone")
    with pytest.raises(PluginError, match=r"host-dist 1\.0 is blocked by ANYGAUGE_BLOCK_PLUGINS"):
        select_backend(load("host"), "host")


# -- auto ----------------------------------------------------------------------------------------


HOST = {"priority": 0, "devices": "not_needed"}


@pytest.mark.parametrize(
    ("installed", "chosen", "reasons"),
    [
        (
            {"host": HOST, "low": {}, "high": {"priority": 20}, "absent": {"devices": "no"}},
            "high",
            {
                "low": "priority 10 is below the 20 of 'high'",
                "host": "priority 0 is below the 20 of 'high'",
                "absent": "device: card no",
            },
        ),
        ({"beta": {}, "alpha": {}}, "alpha", {"beta": "same priority"}),
        (
            {"host": HOST, "fast": {"devices": "no", "driver": "no"}},
            "host",
            {"fast": "device: card no; driver: driver no"},
        ),
        (
            {"host": HOST, "fast": {"priority": 20, "software": "no"}, "other": {}},
            "other",
            {"fast": "software: library no"},
        ),
    ],
    ids=["the highest priority", "the first name", "the host", "a device that works"],
)
def test_auto_takes_one_and_gives_reasons(have, load, installed, chosen, reasons):
    for name, answers in installed.items():
        have(name, **answers)
    selection = select_backend(load(), "auto")
    assert selection.spec.name == chosen
    rejected = dict(selection.rejected)
    for name, reason in reasons.items():
        assert reason in rejected[name]


def test_auto_refuses_to_leave_devices_idle_silently(have, load):
    have("host", **HOST)
    have("fast", software="no")
    with pytest.raises(NotAvailableError) as caught:
        select_backend(load(), "auto")
    message = str(caught.value)
    assert "fast (fast-dist 1.0): card yes" in message
    assert "software: library no" in message
    assert "--backend host" in message


def test_auto_without_need_of_a_device_takes_the_idle_device(have, load):
    have("host", **HOST)
    have("fast", software="no")
    selection = select_backend(load(), "auto", need_device=False)
    assert selection.spec.name == "fast"
    assert not selection.probe.available
    assert "'fast' has devices" in dict(selection.rejected)["host"]


def test_auto_counts_the_devices_of_a_name_claimed_twice(have, load):
    have("host", **HOST)
    have("twin", plugin="one")
    have("twin", plugin="two", version="2.0")
    with pytest.raises(NotAvailableError, match=r"one-dist 1.0 .* and two-dist 2.0"):
        select_backend(load(), "auto")


def test_auto_with_nothing_available_or_installed(have, load):
    with pytest.raises(NotAvailableError, match="no backend"):
        select_backend(load(), "auto")
    have("fast", devices="no")
    with pytest.raises(NotAvailableError, match="fast: device: card no"):
        select_backend(load(), "auto")


def test_auto_names_what_it_could_not_probe(have, install, load):
    have("host", **HOST)
    have("shut")
    install("gone-dist", "3.1", {"gone": "fake_gone"}, fake_gone="import no_such_module")
    reasons = dict(select_backend(load("shut"), "auto").rejected)
    assert "could not be probed" in reasons["gone"]
    assert "no_such_module" in reasons["gone"]
    assert "blocked" in reasons["shut"]


# -- probes --------------------------------------------------------------------------------------


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
    probe = registry.probe_all()["fast"]
    assert not probe.available
    assert reason in probe.reason
    assert "fast-dist 1.0" in probe.reason
    assert registry.probe_all()["host"].available
    assert reason in dict(select_backend(registry, "auto").rejected)["fast"]
    with pytest.raises(NotAvailableError, match="fault of fast-dist"):
        select_backend(registry, "fast")


# -- creation ------------------------------------------------------------------------------------


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
        ("fake_host:Impostor", "gave a Impostor, not an anygauge.interface.Backend"),
        ("fake_host:impostor", "gave a Impostor"),
        ("fake_host:Renamed", "whose name is 'another'"),
        (
            "fake_host:Promising",
            "capabilities have 'bfloat16': True, which is not an",
        ),
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
    more = """
def picky(options):
    raise RunFileError("backend_options: there is no 'threds'")
"""
    have("host", factory="fake_host:picky", more=more)
    with pytest.raises(RunFileError, match="threds"):
        load().create_backend("host", {"threads": 3})


# -- launchers and trackers ----------------------------------------------------------------------

OTHERS = """
from anygauge.interface import hookimpl, API_VERSION, LauncherSpec, TrackerSpec

class Launch: ...

@hookimpl
def anygauge_provide_launchers():
    return [LauncherSpec(
        name="near", factory="fake_others:Launch", api_version=API_VERSION, tested_on="real")]

@hookimpl
def anygauge_provide_trackers():
    yield TrackerSpec(name="board", factory="fake_others:Launch", api_version=API_VERSION)
    yield TrackerSpec(
        name="lacking", factory="fake_others:Launch", api_version=API_VERSION,
        missing=lambda: "package 'boards' is not installed")
    yield TrackerSpec(name="broken", factory="fake_others:gone", api_version=API_VERSION)
"""


def test_launchers_and_trackers_by_name(install, load):
    install("others-dist", "1.0", {"others": "fake_others"}, fake_others=OTHERS)
    registry = load()
    assert registry.launcher("near").__name__ == "Launch"
    assert load_factory(registry.find_tracker("board")).__name__ == "Launch"
    with pytest.raises(PluginError, match=r"no launcher named 'nera'; did you mean 'near'\?"):
        registry.launcher("nera")
    with pytest.raises(PluginError, match="valid names: board, broken, lacking"):
        registry.find_tracker("near")
    lacks = r"tracker 'lacking' of others-dist 1\.0 cannot run here: package 'boards' is not inst"
    with pytest.raises(NotAvailableError, match=lacks):
        refuse_if_missing(registry.find_tracker("lacking"))
    with pytest.raises(PluginError, match=r"tracker 'broken' of others-dist 1\.0: its factory"):
        load_factory(registry.find_tracker("broken"))
