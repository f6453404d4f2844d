"""The section ``strategy`` of a run file: each strategy's own fields, from its plugin."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, WrapValidator, create_model
from pydantic.functional_validators import ModelWrapValidatorHandler

from anygauge.config.tree import YamlNode
from anygauge.interface import StrategySpec
from anygauge.registry import BLOCK_VARIABLE, Provided, Registry
from anygauge.registry.registry import load_options
from anygauge.util.schema import Section

DEFAULT = "auto"
"""The strategy of a run file that names none."""
_NAME = "How the model is spread: a strategy's name."


class StrategySection(Section):
    """How the model is spread over ranks."""

    name: str = Field(description=_NAME)

    def __reduce__(self) -> Any:
        """Each process makes the classes of its sections."""
        return _of_fields, (self.name, self.model_dump(exclude_unset=True))


def registry() -> Registry:
    """The plugins of this process, looked for once for each path that it may import from."""
    return _registry(tuple(sys.path), os.environ.get(BLOCK_VARIABLE, ""))


@cache
def _registry(path: tuple[str, ...], blocked: str) -> Registry:
    return Registry.load({BLOCK_VARIABLE: blocked})


def section_of(name: str | None) -> type[StrategySection]:
    """The section of the strategy of a name; None: of the default.

    Raises:
        UnknownNameError: there is no such strategy; names the nearest.
        PluginError: several claim the name, or its fields cannot be read.
    """
    return _section(registry().find_strategy(DEFAULT if name is None else name))


def all_sections() -> dict[str, type[StrategySection]]:
    """Strategy -> its section; the default comes first."""
    names = sorted((p.spec.name for p in registry().strategies), key=lambda n: (n != DEFAULT, n))
    return {name: section_of(name) for name in names}


def _of_fields(name: str, fields: Mapping[str, Any]) -> StrategySection:
    return section_of(name).model_validate(fields)


@cache
def _section(provided: Provided[StrategySpec]) -> type[StrategySection]:
    options = load_options(provided)
    name = provided.spec.name
    fields: dict[str, Any] = {"name": (Literal[name], Field(name, description=_NAME))}
    bases: Any = (options, StrategySection)
    return create_model(
        f"{StrategySection.__name__}_{name}",
        __base__=bases,
        __doc__=provided.spec.summary or StrategySection.__doc__,
        **fields,
    )


def named(section: type[StrategySection]) -> str:
    """The strategy that a section is of."""
    return str(section.model_fields["name"].default)


def default_section() -> StrategySection:
    """Of a run file that says nothing of its strategy."""
    return section_of(None).model_validate({})


def _validated(
    value: Any, handler: ModelWrapValidatorHandler[StrategySection], info: ValidationInfo
) -> StrategySection:
    """Validate a section as that of the strategy that it names."""
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(name, str | None):
        return handler(value)
    strict = bool(info.context and info.context.get(STRICT))
    return section_of(name).model_validate(dict(value), strict=strict)


def spelled_out(root: YamlNode, *, words: bool = True) -> YamlNode:
    """The tree of a run file whose strategy is a word, with the section that it stands for.

    Args:
        words: also strategies' shorthands, which depend on the numbers of nodes and devices.
    """
    section = root.get("strategy")
    if section is None:
        return root
    given: dict[Any, Any] = dict(section.value) if section.is_mapping else {"name": section}
    node = given.get("name")
    if node is None or not isinstance(node.value, str):
        return root
    found = next((p.spec for p in registry().strategies if node.value in p.spec.shorthands), None)
    if (found is None and section.is_mapping) or (found is not None and not words):
        return root
    fields = {"name": node}
    if found is not None:
        made = found.shorthands[node.value](_count(root, "nodes"), _count(root, "devices"))
        fields["name"] = replace(node, value=found.name)
        fields |= {name: replace(node, value=value) for name, value in made.items()}
    fields = {**given, **fields, **{k: v for k, v in given.items() if k != "name"}}
    return replace(root, value=root.value | {"strategy": replace(section, value=fields, text="")})


def _count(root: YamlNode, field: str) -> int:
    """``launch.nodes`` or ``launch.devices``, as far as it is a number."""
    node = root.get("launch", field)
    return node.value if node is not None and type(node.value) is int and node.value > 0 else 1


STRICT = "strict"
"""In a validation's context: types are not converted, in a strategy's fields either."""

AnyStrategySection = SerializeAsAny[StrategySection]
"""A field of any strategy's section, written with all of its fields."""

ByName = WrapValidator(_validated)
"""Validates each section by the class of the strategy that it names."""
