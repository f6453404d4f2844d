"""The section ``strategy`` of a run file, and the shorter ways to write it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field, SerializeAsAny

from anygauge.config.plugin_sections import PluginSection
from anygauge.config.tree import YamlNode
from anygauge.registry import installed_plugins


class StrategySection(PluginSection):
    """How the model is spread over ranks."""

    plugin_kind: ClassVar = "strategy"
    plugin_kinds: ClassVar = "strategies"
    default_plugin: ClassVar = "auto"

    name: str = Field(description="How the model is spread: a strategy's name.")


AnyStrategySection = SerializeAsAny[StrategySection]
"""A section of any strategy, written whole."""


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
