"""Plugins load, are blocked or fail, each on its own."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from anygauge.interface import PluginError
from anygauge.registry import BLOCK_VARIABLE, Registry, select_backend
from tests.helpers.fake_files import add_distribution
from tests.registry.conftest import SHIPPED


def names(registry):
    return [provided.spec.name for provided in registry.backends]


@pytest.fixture
def good(have):
    """A sound plugin that must load whatever its neighbours do."""
    have("good", version="1.2")


def only_failure(registry):
    assert names(registry) == ["good"]
    (failure,) = registry.failures
    assert failure.origin == "bad-dist 0.3"
    return failure


def test_sound_plugin_loads_with_its_origin(have, load):
    have("good", plugin="entry", version="1.2")
    registry = load()
    (provided,) = registry.backends
    assert provided.title == "backend 'good' of entry-dist 1.2"
    assert provided.entry_point == "entry" and not registry.failures


@pytest.mark.parametrize("block", ["bad", "bad-dist", "Bad_Dist", " bad "])
def test_blocked_plugin_is_recorded_and_never_imported(good, install, load, block):
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad="raise RuntimeError('imported')")
    registry = load(block)
    assert not registry.failures
    (blocked,) = [b for b in registry.blocked if b.distribution not in SHIPPED]
    assert (blocked.origin, blocked.entry_point) == ("bad-dist 0.3", "bad")
    assert blocked.blocked_by == block.strip()


def test_block_without_a_plugin_is_reported(good, load):
    registry = load("goood")
    assert registry.unmatched_blocks == ["goood"]
    assert names(registry) == ["good"]


def test_environment_of_the_process_is_read_by_default(good, monkeypatch):
    monkeypatch.setenv(BLOCK_VARIABLE, ",".join((*SHIPPED, "good")))
    registry = Registry.load()
    assert names(registry) == []
    assert "good" in [b.entry_point for b in registry.blocked]


HOOK = """
from anygauge.interface import hookimpl

@hookimpl
def anygauge_provide_{}:
    {}
"""
WHOLE_OR_NOT = """
@hookimpl
def anygauge_provide_launchers():
    raise OSError("disk")
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 +", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "implements no hook"),
        (HOOK.format("backend()", "return []"), "unknown hook 'anygauge_provide_backend'"),
        (HOOK.format("backend()", "return []"), "did you mean 'anygauge_provide_backends'?"),
        (HOOK.format("backends(color)", "return []"), "color"),
        ("def anygauge_provide_backends(): ...", "'anygauge_provide_backends' is not marked"),
        ("def anygauge_provide_backend(): ...", "'anygauge_provide_backend' is not marked"),
        (HOOK.format("backends()", "raise KeyError('gone')"), "backends raised KeyError: 'gone'"),
        (HOOK.format("backends()", "yield 1 / 0"), "ZeroDivisionError"),
        (HOOK.format("backends()", "return None"), "gave None"),
        (HOOK.format("backends()", "return 7"), "gave a bare int"),
        (HOOK.format("backends()", "return ['a']"), "gave 'a', a str; it must give BackendSpec"),
    ],
)
def test_a_plugin_that_cannot_be_taken_says_why(good, install, load, source, reason):
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    failure = only_failure(load())
    assert failure.entry_point == "bad"
    assert reason in failure.reason


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("fake_nowhere", "fake_nowhere"),
        ("fake_bad:plugin", "names an object; a plugin is a module: write 'fake_bad'"),
    ],
)
def test_an_entry_point_names_a_module(good, install, load, module, reason):
    install("bad-dist", "0.3", {"bad": module}, fake_bad="plugin = object()")
    assert reason in only_failure(load()).reason


def test_unreadable_entry_points(good, install, load, tmp_path):
    install("bad-dist", "0.3", {})
    (tmp_path / "site/bad_dist-0.3.dist-info/entry_points.txt").write_text("[anygauge]\nnonsense\n")
    assert "metadata cannot be read" in only_failure(load()).reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"api_version": "API_VERSION + 1"}, "version 2 of the plugin contract"),
        ({"api_version": "API_VERSION + 1"}, "Install a newer anygauge, or a release of bad-dist"),
        ({"api_version": "API_VERSION - 1"}, "Install a release of bad-dist made for it"),
        ({"api_version": "'1'"}, "for version '1' of"),
        ({"name": "auto"}, "'auto' is reserved"),
        ({"name": "two words"}, "a name is letters"),
        ({"factory": "fake_bad.Fake"}, "must read 'package.module:name'"),
        ({"options": "Options"}, "options 'Options' must read 'package.module:name'"),
        ({"priority": "'high'"}, "priority 'high' is not an integer"),
        ({"priority": "1, hardware='a.toml'"}, "hardware 'a.toml' must read 'package:file.toml'"),
        # A plugin is taken whole or not at all.
        ({"more": WHOLE_OR_NOT}, "anygauge_provide_launchers raised OSError: disk"),
    ],
)
def test_spec_of_the_wrong_form(good, have, load, change, reason):
    have(**{"name": "bad", "plugin": "bad", "version": "0.3", **change})
    assert reason in only_failure(load()).reason


def test_one_name_of_two_distributions(good, have, load):
    have("twin", plugin="one")
    have("twin", plugin="two", version="2.0")
    registry = load()
    assert names(registry) == ["good"]
    (duplicate,) = registry.duplicates
    assert (duplicate.kind, duplicate.name) == ("backend", "twin")
    for use in (partial(select_backend, registry), registry.create_backend):
        with pytest.raises(PluginError, match=r"by one-dist 1\.0 .* and two-dist 2\.0"):
            use("twin")
    assert select_backend(load("one"), "twin").provided.distribution == "two-dist"


def test_first_distribution_of_a_name_on_the_path_counts(good, load, tmp_path, monkeypatch):
    later = tmp_path / "later"
    add_distribution(later, "good.dist", "9.9", "[anygauge]\ngood = fake_good\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later)])
    registry = load()
    assert [p.version for p in registry.backends] == ["1.2"]
    assert not registry.duplicates
