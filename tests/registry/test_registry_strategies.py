"""Strategies of other distributions: doubles and unusable options are named."""

from __future__ import annotations

import pytest

from anygauge.interface import PluginError
from anygauge.registry.specs import load_options


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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("nowhere:Options", r"its options 'nowhere:Options' cannot be loaded: ModuleNotFoundError"),
        ("fake_a:number", r"its options 'fake_a:number' is not a class that derives from anygauge"),
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
