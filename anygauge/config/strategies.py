"""The section ``strategy`` of a run file: each strategy's own fields, from its plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator, create_model
from pydantic.functional_validators import ModelWrapValidatorHandler

from anygauge.config.tree import YamlNode
from anygauge.interface import PluginError, StrategySpec
from anygauge.registry import Provided, installed_plugins
from anygauge.registry.specs import load_options
from anygauge.util.section import Section

DEFAULT = "auto"
"""The strategy of a run file that names none."""
_NAME = "How the model is spread: a strategy's name."


def _check_known(name: Any) -> Any:
    if not isinstance(name, str):
        got = f"{json.dumps(name)} ({type(name).__name__})"
        raise ValueError(f"got {got}, expected the name of a strategy")
    try:
        section_of(name)
    except PluginError as error:
        raise ValueError("; ".join(str(error).splitlines())) from None
    return name


class StrategySection(Section):
    """How the model is spread over ranks."""

    name: Annotated[str, BeforeValidator(_check_known)] = Field(description=_NAME)


def section_of(name: str | None) -> type[StrategySection]:
    """The section of the strategy of a name; None: of the default.

    Raises:
        UnknownNameError: there is no such strategy; names the nearest.
        PluginError: several claim the name, or its fields cannot be read.
    """
    return _section_class(installed_plugins().find_strategy(DEFAULT if name is None else name))


def all_sections() -> dict[str, type[StrategySection]]:
    """Strategy -> its section; the default comes first."""
    names = sorted(
        (p.spec.name for p in installed_plugins().strategies), key=lambda n: (n != DEFAULT, n)
    )
    return {name: section_of(name) for name in names}


@cache
def _section_class(provided: Provided[StrategySpec]) -> type[StrategySection]:
    name = provided.spec.name
    fields: dict[str, Any] = {"name": (Literal[name], Field(name, description=_NAME))}
    bases: Any = (load_options(provided), StrategySection)
    return create_model(
        f"{StrategySection.__name__}_{name}",
        __base__=bases,
        __doc__=provided.spec.summary or StrategySection.__doc__,
        **fields,
    )


def strategy_of(section: type[StrategySection]) -> str:
    """The strategy that a section is of."""
    return str(section.model_fields["name"].default)


def default_section() -> StrategySection:
    """Return the section of a run file that does not name a strategy."""
    return section_of(None).model_validate({})


def _validate(value: Any, handler: ModelWrapValidatorHandler[StrategySection]) -> StrategySection:
    """Validate a section as that of the strategy that it names."""
    if not isinstance(value, Mapping):
        return handler(value)
    name = value.get("name")
    try:
        section = section_of(name)
    except (PluginError, TypeError):
        return handler({"name": name})  # what is wrong with the name, and nothing of other fields
    return section.model_validate(dict(value))


AnyStrategySection = Annotated[SerializeAsAny[StrategySection], WrapValidator(_validate)]
"""A section of any strategy: checked by the class of the one that it names, written whole."""


def word_as_section(root: YamlNode) -> None:
    """Make ``strategy: {name: zero}`` of a run file's ``strategy: zero``, to be known as a word."""
    node = root.get("strategy")
    if node is not None and isinstance(node.value, str):
        root.value["strategy"] = YamlNode({"name": node}, node.origin, node.text)


def spell_out(root: YamlNode) -> None:
    """Add the fields that a strategy's shorthand, such as ``mics``, stands for."""
    name = root.get("strategy", "name")
    if name is None or not isinstance(name.value, str):
        return
    for spec in (provided.spec for provided in installed_plugins().strategies):
        if make := spec.shorthands.get(name.value):
            made = make(_count_in(root, "nodes"), _count_in(root, "devices"))
            given = root.value["strategy"].value
            given["name"] = replace(name, value=spec.name)
            for field, value in made.items():
                given.setdefault(field, replace(name, value=value))
            return


def _count_in(root: YamlNode, field: str) -> int:
    """``launch.nodes`` or ``launch.devices``, as far as it is a number."""
    node = root.get("launch", field)
    return node.value if node is not None and type(node.value) is int and node.value > 0 else 1
