"""Strategies of other distributions: doubles, defaults and unusable options are named."""

from __future__ import annotations

import pytest

from anygauge.interface import PluginError
from anygauge.registry.registry import load_options


def source(name: str, **fields: object) -> str:
    given = "".join(f", {field}={value!r}" for field, value in fields.items())
    return f"""\
from anygauge.interface import API_VERSION, StrategySpec, hookimpl

class Options:
    pass

number = 3

@hookimpl
def anygauge_provide_strategies():
    return [StrategySpec(
        name={name!r}, factory="fake_{name}:Options", api_version=API_VERSION{given}
    )]
"""


def test_a_name_that_two_distributions_claim_is_nobodys(install, load):
    for place in ("one", "two"):
        install(f"{place}-dist", "1.0", {place: f"fake_{place}"}, **{f"fake_{place}": source("x")})
    with pytest.raises(PluginError, match=r"strategy 'x' is provided by one-dist 1\.0 .* two-dist"):
        load().find_strategy("x")


def test_the_first_default_that_is_installed_is_taken(install, load):
    with pytest.raises(PluginError, match="names none, and no plugin provides a default"):
        load().default_strategy()
    install("b-dist", "2.0", {"b": "fake_b"}, fake_b=source("b", default=2))
    assert load().default_strategy().spec.name == "b"
    assert load().why_default() == ""
    lacking = source("a", default=1, distributions=("b-dist", "not-there"))
    install("a-dist", "1.0", {"a": "fake_a"}, fake_a=lacking)
    assert load().default_strategy().spec.name == "b"
    why = "a needs not-there, which this machine lacks: pip install not-there"
    assert load().why_default() == why
    install("not-there", "1.0", {})
    assert load().default_strategy().spec.name == "a"
    assert load().why_default() == ""


def test_defaults_of_which_none_is_installed_are_named(install, load):
    lacking = source("a", default=1, distributions=("x", "y"), install="make x y")
    install("a-dist", "1.0", {"a": "fake_a"}, fake_a=lacking)
    told = r"a needs x and y, which this machine lacks: make x y\. Name a strategy: a"
    with pytest.raises(PluginError, match=told):
        load().default_strategy()


def test_two_defaults_of_one_place_are_named(install, load):
    for name in "ab":
        fake = {f"fake_{name}": source(name, default=1)}
        install(f"{name}-dist", "1.0", {name: f"fake_{name}"}, **fake)
    with pytest.raises(PluginError, match=r"'a' of a-dist 1\.0 and 'b' of b-dist 1\.0 both claim"):
        load().default_strategy()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("nowhere:Options", r"its options 'nowhere:Options' cannot be loaded: ModuleNotFoundError"),
        ("fake_a:number", r"its options 'fake_a:number' is not a class, but a int"),
    ],
)
def test_options_that_cannot_be_read_are_named_when_they_are_asked_for(
    install, load, options, told
):
    install("a-dist", "1.0", {"a": "fake_a"}, fake_a=source("a", options=options))
    provided = load().find_strategy("a")
    with pytest.raises(PluginError, match=rf"strategy 'a' of a-dist 1\.0: {told}"):
        load_options(provided)


def test_options_are_named_as_a_factory_is(install, load):
    install("a-dist", "1.0", {"a": "fake_a"}, fake_a=source("a", options="Options"))
    (failure,) = load().failures
    assert failure.reason == ("StrategySpec 'a': options 'Options' must read 'package.module:name'")


def test_a_misspelt_hook_is_named(install, load):
    misspelt = source("a").replace("provide_strategies", "provide_strategys")
    install("a-dist", "1.0", {"a": "fake_a"}, fake_a=misspelt)
    (failure,) = load().failures
    assert "did you mean 'anygauge_provide_strategies'?" in failure.reason
