"""The schema in words: what a field takes, and which sections there are."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, JsonValue, create_model
from pydantic.fields import FieldInfo

from anygauge.config.plugin_sections import PluginSection
from anygauge.config.schema import RunFile
from anygauge.config.sections import OptimizerSection, TrainSection
from anygauge.config.strategies import StrategySection
from anygauge.config.tree import YamlNode
from anygauge.interface import PluginError
from anygauge.registry import installed_plugins
from anygauge.registry.specs import OPTIONS_AT, load_options
from anygauge.util.section import Section

LARGEST_SHOWN = 100_000
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WORDS: Mapping[Any, str] = {
    **{int: "whole number", float: "number", str: "text", bool: "true or false"},
    **{None: "null", type(None): "null", Any: "any value", JsonValue: "any value"},
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A type with its bounds: `annotation` is free of Annotated, `metadata` holds the bounds."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @staticmethod
    def of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
        """Splits Annotated[...] into type and metadata."""
        while get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            for item in more:
                metadata += tuple(item.metadata) if isinstance(item, FieldInfo) else (item,)
        return Kind(annotation, metadata)

    @property
    def members(self) -> tuple[Kind, ...]:
        """The alternatives of a union; of any other type, itself."""
        if get_origin(self.annotation) in (Union, types.UnionType):
            return tuple(Kind.of(member, self.metadata) for member in get_args(self.annotation))
        return (self,)

    @property
    def section(self) -> type[Section] | None:
        """The section that this type is, null aside."""
        for member in self.members:
            if isinstance(member.annotation, type) and issubclass(member.annotation, Section):
                return member.annotation
        return None

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The sections that this type is, or is a list or mapping of; each once."""
        found = [self.section]
        for member in self.members:
            values = (
                get_args(member.annotation)[1:] if get_origin(member.annotation) is dict else ()
            )
            parts = (member.item, *map(Kind.of, values))
            found += [kind.section for kind in parts if kind is not None]
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def item(self) -> Kind | None:
        """What a list is of; None for what is none."""
        found = get_args(self.annotation) if get_origin(self.annotation) is list else ()
        return Kind.of(found[0]) if found else None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal, as a run file has them."""
        found = get_args(self.annotation) if get_origin(self.annotation) is Literal else ()
        return tuple(map(as_yaml, found))

    def bound(self, name: str) -> Any:
        """A limit as pydantic names it (``le``, ``max_length``, ``pattern``); None without one."""
        found = (getattr(item, name, None) for item in self.metadata)
        return next((limit for limit in found if limit is not None), None)

    def child(self, part: object) -> Kind | None:
        """The type of a field, an entry or an item of this one; None where it has no such part."""
        for member in self.members:
            origin, args = get_origin(member.annotation), get_args(member.annotation)
            if member.section is not None and isinstance(part, str):
                field = member.section.model_fields.get(part)
                return None if field is None else field_kind(field)
            if origin is dict:
                return Kind.of(args[1])
            if type(part) is int and origin is list:
                return member.item
            if type(part) is int and origin is tuple:
                return Kind.of(args[part]) if part < len(args) else None
        return None

    def descendant(self, path: tuple[object, ...]) -> Kind | None:
        """The type at a path below this one; None where there is nothing."""
        kind: Kind | None = self
        for part in path:
            kind = None if kind is None else kind.child(part)
        return kind

    def values(self, node: YamlNode) -> Any:
        """Plain values for pydantic, with null as "left out" wherever a default stands ready."""
        if node.is_mapping:
            fields = {} if self.section is None else self.section.model_fields
            return {
                name: (self.child(name) or Kind(Any)).values(below)
                for name, below in node.value.items()
                if below.value is not None or name not in fields or fields[name].is_required()
            }
        if not isinstance(node.value, tuple):
            return node.value
        items = [(self.child(n) or Kind(Any)).values(item) for n, item in enumerate(node.value)]
        is_tuple = any(get_origin(member.annotation) is tuple for member in self.members)
        return tuple(items) if is_tuple else items

    def __str__(self) -> str:
        if len(self.members) > 1:
            return " or ".join(map(str, self.members))
        origin, args = get_origin(self.annotation), get_args(self.annotation)
        if self.section is not None:
            return "section"
        if self.choices:
            several = "one of " if len(self.choices) > 1 else ""
            return f"{several}{', '.join(self.choices)}"
        if self.item is not None:
            return f"list of {self.item}"
        if origin is tuple:
            return f"list of {len(args)}: {', '.join(str(Kind.of(arg)) for arg in args)}"
        if origin is dict:
            return "mapping" if args[1] is Any else f"mapping of names to {Kind.of(args[1])}"
        word = _WORDS.get(self.annotation, str(self.annotation))
        bounds = [
            f"{sign} {limit:g}"
            for name, sign in _BOUNDS.items()
            if (limit := self.bound(name)) is not None
            # Most of these no user meets; a complaint names the one that was passed.
            and not (name == "le" and limit >= LARGEST_SHOWN)
        ]
        if pattern := self.bound("pattern"):
            bounds.append(f"matching {pattern}")
        return " ".join([word, " and ".join(bounds)]) if bounds else word


def kind_of_run(root: YamlNode) -> Kind:
    """A run file's type: `RunFile` with the sections of the plugins which the tree names."""
    named: list[Any] = []
    for base, path in (
        (StrategySection, ("strategy",)),
        (OptimizerSection, ("train", "optimizer")),
    ):
        node = root.get(*path, "name")
        try:
            named.append(base.of_plugin(None if node is None else node.value))
        except (PluginError, TypeError):
            named.append(base)  # which says what is wrong with the name
    return _kind_with(*named)


@cache
def _kind_with(strategy: Any, optimizer: Any) -> Kind:
    def field(section: Any) -> Any:
        return section, Field(default_factory=section)

    def with_fields(base: Any, **fields: Any) -> Any:
        return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)

    train = with_fields(TrainSection, optimizer=field(optimizer))
    return Kind(with_fields(RunFile, strategy=field(strategy), train=field(train)))


def field_kind(field: FieldInfo) -> Kind:
    """The type of a section's field."""
    return Kind.of(field.annotation, tuple(field.metadata))


def meaning(field: FieldInfo) -> str:
    """Return a field's description; of a section without one, the first line of its class."""
    if field.description:
        return field.description
    section = field_kind(field).section
    return "" if section is None else (section.__doc__ or "").strip().splitlines()[0]


def section_summary(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring, in one line."""
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split())


def meaning_in(section: type[Section], name: str) -> str:
    """Return what a field of a section means, also where ``Attributes`` of a docstring say it."""
    if text := meaning(section.model_fields[name]):
        return text
    for owner in inspect.getmro(section):
        _, _, about = inspect.cleandoc(owner.__dict__.get("__doc__") or "").partition("Attributes:")
        line = rf"^    (?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{5,}}.*)*)"
        if found := re.search(line, about, re.MULTILINE):
            return " ".join(found[1].split())
    return ""


def default_text(field: FieldInfo) -> str:
    """Return a field's default as a run file has it; ``required``, or ``its defaults``."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    return "its defaults" if isinstance(value, Section) else as_yaml(value)


def as_yaml(value: Any) -> str:
    """Write a value as a run file has it, in one line; what a mapping holds is left out."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{}" if not value else "{...}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, str):
        # A line break would end the line, or the row of a table.
        return value if value.isprintable() else json.dumps(value)
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class SectionPlace:
    """A section, and where it stands in a run file.

    Attributes:
        owner: kind and name of the plugin whose it is, ``launcher slurm``; "" of the core's.
        whole: all that this plugin takes, not a part of that.
    """

    path: tuple[str, ...]
    section: type[Section]
    owner: str = ""
    whole: bool = True


def all_places() -> tuple[list[SectionPlace], list[str]]:
    """Return every section, those of plugins too, and why options of a plugin cannot be read."""
    places, unread = [], []
    for path, section in sections():
        owner = ""
        if issubclass(section, PluginSection):
            owner = f"{section.plugin_kind} {section.plugin_name}"
        places.append(SectionPlace(path, section, owner))
    for kind, at in OPTIONS_AT.items():
        for provided in getattr(installed_plugins(), f"{kind}s"):
            name = provided.spec.name
            try:
                options = load_options(provided)
            except PluginError as error:
                unread.append(str(error))
                continue
            found = sections(tuple(at.format(name).split(".")), options)
            owner = f"{kind} {name}"
            places += [SectionPlace(path, one, owner, one is options) for path, one in found]
    return places, unread


def sections(
    path: tuple[str, ...] = (), section: type[Section] = RunFile
) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Every section with its path, outer ones first; the run file itself has the path ().

    The items of a list share the list's path, and all plugins of a kind that of theirs.
    """
    yield path, section
    for name, field in section.model_fields.items():
        for kind in field_kind(field).sections:
            of_plugins = kind.of_plugins().values() if issubclass(kind, PluginSection) else ()
            for inner in of_plugins or (kind,):
                yield from sections((*path, name), inner)
