"""What version 0.1 called some fields: messages name the new ones; its files are still read.

A run file with an old name is refused by its new one. A resolved run file, a checkpoint and a
report of that version are read with today's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge.config.tree import YamlNode

RENAMED: Mapping[tuple[str, ...], str] = {
    ("adapter", "rank"): "r",
    ("adapter", "groups", "rank"): "r",
    ("data", "train", "form"): "format",
    ("data", "eval", "form"): "format",
    ("data", "length_grouping"): "group_by_length",
    ("train", "global_batch"): "global_batch_size",
    ("train", "micro_batch"): "micro_batch_size",
    ("train", "clip"): "max_grad_norm",
    ("train", "optimizer", "lora_plus_ratio"): "loraplus_lr_ratio",
    ("precision", "compute"): "param_dtype",
    ("precision", "reduce"): "reduce_dtype",
}
"""Old path -> new last part. The items of a list share the list's path."""

VALUES: Mapping[tuple[str, ...], Mapping[Any, str]] = {
    ("precision", "reduce"): {"compute": "param_dtype"},
}
"""Old path -> values that have another name today."""

RECORD = "# A resolved run file: every field with its value, all paths absolute.\n"
"""How the resolved run files of version 0.1 begin."""


_ON_THE_WAY = frozenset(path[:length] for path in RENAMED for length in range(1, len(path)))


def new_name(path: tuple[object, ...]) -> str | None:
    """What the field at a path is called today; None where that is not an old name."""
    return RENAMED.get(tuple(part for part in path if isinstance(part, str)))


def new_value(path: tuple[object, ...], value: Any) -> Any:
    """What a value of version 0.1 at a path is called today."""
    names = VALUES.get(tuple(part for part in path if isinstance(part, str)))
    return names.get(value, value) if names and isinstance(value, str) else value


def translated(node: YamlNode, path: tuple[str, ...] = ()) -> YamlNode:
    """The tree of a resolved run file of version 0.1, with today's names."""
    if isinstance(node.value, tuple):
        return replace(node, value=tuple(translated(item, path) for item in node.value))
    if not node.is_mapping:
        return replace(node, value=new_value(path, node.value))
    fields = {}
    for name, below in node.value.items():
        here = (*path, name)
        new = RENAMED.get(here, name)
        # Whoever has added the new name to such a file gets a message to remove the old one.
        fields[name if new in node.value else new] = translated(below, here)
    return replace(node, value=fields)


def translated_record(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Values by name or dotted path, as checkpoints and reports have them, with today's names."""

    def below(value: Any, here: tuple[str, ...]) -> Any:
        # What a file holds may be nested without an end; what was renamed is not.
        if isinstance(value, Mapping) and here in _ON_THE_WAY:
            return translated_record(value, here)
        return new_value(here, value)

    found = {}
    for name, value in values.items():
        here = (*path, *name.split("."))
        outer, dot, _ = name.rpartition(".")
        found[outer + dot + RENAMED[here] if here in RENAMED else name] = (
            [below(item, here) for item in value] if isinstance(value, list) else below(value, here)
        )
    return found
