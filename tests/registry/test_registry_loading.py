"""Plugins load, are blocked or fail, each on its own."""

from __future__ import annotations

from functools import partial

import pytest

from anygauge.interface import PluginError
from anygauge.registry import BLOCK_VARIABLE, Registry, select_backend
from tests.registry.conftest import SHIPPED


def names(registry):
    return [provided.spec.name for provided in registry.backends]


@pytest.fixture
def good(install, backend_source):
    """A sound plugin that must load whatever its neighbours do."""
    install("good-dist", "1.2", {"good": "fake_good"}, fake_good=backend_source("good"))


def only_failure(registry, distribution="bad-dist"):
    assert names(registry) == ["good"]
    (failure,) = registry.failures
    assert (failure.distribution, failure.version) == (distribution, "0.3")
    return failure


def test_sound_plugin_loads_with_its_origin(install, backend_source, load):
    install("good-dist", "1.2", {"entry": "fake_good"}, fake_good=backend_source("good"))
    registry = load()
    (provided,) = registry.backends
    assert provided.spec.name == "good"
    assert (provided.distribution, provided.version) == ("good-dist", "1.2")
    assert provided.entry_point == "entry"
    assert registry.failures == ()


@pytest.mark.parametrize("block", ["bad", "bad-dist", "Bad_Dist", " bad "])
def test_blocked_plugin_is_recorded_and_never_imported(good, install, load, block):
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad="raise RuntimeError('imported')")
    registry = load(block)
    assert registry.failures == ()
    (blocked,) = [b for b in registry.blocked if b.distribution not in SHIPPED]
    assert (blocked.distribution, blocked.version, blocked.entry_point) == (
        "bad-dist",
        "0.3",
        "bad",
    )
    assert blocked.blocked_by == block.strip()


def test_block_without_a_plugin_is_reported(good, load):
    registry = load("goood")
    assert registry.unmatched_blocks == ("goood",)
    assert names(registry) == ["good"]


def test_environment_of_the_process_is_read_by_default(good, monkeypatch):
    monkeypatch.setenv(BLOCK_VARIABLE, ",".join((*SHIPPED, "good")))
    registry = Registry.load()
    assert names(registry) == []
    assert "good" in [b.entry_point for b in registry.blocked]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 +", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "implements no hook"),
    ],
)
def test_module_that_cannot_be_imported(good, install, load, source, reason):
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    failure = only_failure(load())
    assert failure.entry_point == "bad"
    assert reason in failure.reason


def test_missing_module(good, install, load):
    install("bad-dist", "0.3", {"bad": "fake_nowhere"})
    assert "fake_nowhere" in only_failure(load()).reason


def test_entry_point_must_name_a_module(good, install, load):
    install("bad-dist", "0.3", {"bad": "fake_bad:plugin"}, fake_bad="plugin = object()")
    assert "names an object" in only_failure(load()).reason
    assert "'fake_bad'" in only_failure(load()).reason


def test_unreadable_entry_points(good, install, load, tmp_path):
    install("bad-dist", "0.3", {})
    (tmp_path / "site/bad_dist-0.3.dist-info/entry_points.txt").write_text("[anygauge]\nnonsense\n")
    assert "metadata cannot be read" in only_failure(load()).reason


def test_misspelt_hook_is_an_error_with_a_suggestion(good, install, load):
    install(
        "bad-dist",
        "0.3",
        {"bad": "fake_bad"},
        fake_bad="""
            from anygauge.interface import hookimpl

            @hookimpl
            def anygauge_provide_backend():
                return []
        """,
    )
    reason = only_failure(load()).reason
    assert "unknown hook 'anygauge_provide_backend'" in reason
    assert "did you mean 'anygauge_provide_backends'?" in reason


@pytest.mark.parametrize("name", ["anygauge_provide_backends", "anygauge_provide_backend"])
def test_unmarked_hook_is_an_error(good, install, load, name):
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad=f"def {name}():\n    return []\n")
    reason = only_failure(load()).reason
    assert f"{name!r} is not marked" in reason


def test_hook_with_an_unknown_argument(good, install, load):
    install(
        "bad-dist",
        "0.3",
        {"bad": "fake_bad"},
        fake_bad="""
            from anygauge.interface import hookimpl

            @hookimpl
            def anygauge_provide_backends(color):
                return []
        """,
    )
    assert "color" in only_failure(load()).reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('gone')", "anygauge_provide_backends raised KeyError: 'gone'"),
        ("yield 1 / 0", "ZeroDivisionError"),
        ("return None", "gave None"),
        ("return 7", "gave a bare int"),
        ("return ['good']", "gave 'good', a str; it must give BackendSpec"),
    ],
)
def test_hook_that_gives_no_specs(good, install, load, body, reason):
    install(
        "bad-dist",
        "0.3",
        {"bad": "fake_bad"},
        fake_bad=f"""
            from anygauge.interface import hookimpl

            @hookimpl
            def anygauge_provide_backends():
                {body}
        """,
    )
    assert reason in only_failure(load()).reason


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
        ({"priority": "'high'"}, "priority 'high' is not an integer"),
    ],
)
def test_spec_of_the_wrong_form(good, install, load, backend_source, change, reason):
    arguments = {"name": "bad", "module": "fake_bad", **change}
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad=backend_source(**arguments))
    assert reason in only_failure(load()).reason


def test_a_plugin_is_taken_whole_or_not_at_all(good, install, load, backend_source):
    launchers = """
@hookimpl
def anygauge_provide_launchers():
    raise OSError("disk")
"""
    install("bad-dist", "0.3", {"bad": "fake_bad"}, fake_bad=backend_source("bad", more=launchers))
    assert "anygauge_provide_launchers raised OSError: disk" in only_failure(load()).reason


def test_one_name_of_two_distributions(good, install, load, backend_source):
    install("one-dist", "1.0", {"one": "fake_one"}, fake_one=backend_source("twin"))
    install("two-dist", "2.0", {"two": "fake_two"}, fake_two=backend_source("twin"))
    registry = load()
    assert names(registry) == ["good"]
    (duplicate,) = registry.duplicates
    assert (duplicate.kind, duplicate.name) == ("backend", "twin")
    for use in (partial(select_backend, registry), registry.create_backend, registry.probe):
        with pytest.raises(PluginError) as caught:
            use("twin")
        assert "one-dist 1.0" in str(caught.value)
        assert "two-dist 2.0" in str(caught.value)
    assert select_backend(load("one"), "twin").provided.distribution == "two-dist"


def test_first_distribution_of_a_name_on_the_path_counts(
    good, install, load, backend_source, tmp_path, monkeypatch
):
    later = tmp_path / "later" / "good_dist-9.9.dist-info"
    later.mkdir(parents=True)
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: good.dist\nVersion: 9.9\n")
    (later / "entry_points.txt").write_text("[anygauge]\ngood = fake_good\n")
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path, str(later.parent)])
    registry = load()
    assert [p.version for p in registry.backends] == ["1.2"]
    assert registry.duplicates == ()
