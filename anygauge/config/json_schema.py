"""The run file's JSON schema (draft 2020-12) for editors, with the options of installed plugins.

Pydantic writes the sections. What only the reader knows is added here: null stands for a default,
a plugin's name decides its options, and a file with `extends` need not have what others require.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from pydantic_core import to_jsonable_python

from anygauge.config.describe import Place, all_places, meaning_in
from anygauge.config.schema import RunFile
from anygauge.config.strategies import DEFAULT, StrategySection, strategy_of
from anygauge.interface import LaunchSettings
from anygauge.registry import AUTO, installed_plugins
from anygauge.util.section import NULLS_REMOVED, Section

Schema = dict[str, Any]

EXTENDS = "A file, or a list of files, that this one changes; relative to this file."
TITLE = "A run file of anygauge"
_REF = "#/$defs/"
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_FILES: Schema = {"type": "array", "items": _TEXT}


def run_file_schema() -> tuple[Schema, list[str]]:
    """The schema, and why options of a plugin cannot be read: they may then be anything."""
    places, unread = all_places()
    sections = {place.section: place for place in reversed(places)}
    refs, made = models_json_schema(
        [(section, "validation") for section in sections],
        ref_template=f"{_REF}{{model}}",
    )
    names: dict[Any, str] = {section: ref["$ref"] for (section, _), ref in refs.items()}
    whole: Mapping[str, Schema] = made["$defs"]
    for section, place in sections.items():
        _complete(whole[names[section].removeprefix(_REF)], place)
    required = {section: _required({"$ref": name}, whole) for section, name in names.items()}
    defs: dict[str, Schema] = {name: _without_required(each, whole) for name, each in whole.items()}

    # Of plugins: kind -> name -> reference to its options, and what these require.
    options: dict[str, dict[str, Schema]] = {"backend": {}, "launcher": {}, "tracker": {}}
    for kind, found in options.items():
        found |= {one.spec.name: {} for one in getattr(installed_plugins(), f"{kind}s")}
    needs: dict[str, dict[str, Schema]] = {kind: {} for kind in options}
    for place in (one for one in places if one.whole):
        kind, _, name = place.owner.partition(" ")
        if kind in options:
            options[kind][name] = {"$ref": names[place.section]}
            needs[kind] |= {name: required[place.section]} if required[place.section] else {}

    launch = defs[names[LaunchSettings].removeprefix(_REF)]
    launchers = {name: _property("options", ref) for name, ref in options["launcher"].items()}
    launch["allOf"] = _rules("launcher", {(name,): then for name, then in launchers.items()})
    _allow(launch, "launcher", options["launcher"])
    root = defs.pop(names[RunFile].removeprefix(_REF))
    backends = {(n,): _property("backend_options", ref) for n, ref in options["backend"].items()}
    root["allOf"] = _rules("backend", backends, [AUTO])
    _allow(root, "backend", [AUTO, *options["backend"]])
    fields, by_name = root["properties"], _strategies(sections, names, defs)
    fields["extends"] = {"description": EXTENDS, "anyOf": [_TEXT, _FILES, _NULL]}
    words = [word for group in by_name for word in group]
    fields["strategy"] = {
        "description": fields["strategy"].get("description", ""),
        "anyOf": [
            {"enum": words},
            {
                "type": "object",
                "properties": {"name": {"enum": [*words, None]}},
                "allOf": _rules("name", by_name),
            },
            _NULL,
        ],
    }
    listed = fields["trackers"]["anyOf"][0]
    listed |= {"items": {"enum": list(options["tracker"])}, "uniqueItems": True}
    tracked = {"properties": options["tracker"], "additionalProperties": False, "type": "object"}
    fields["tracker_options"]["anyOf"][0] = tracked

    complete = dict(required[RunFile])
    unnamed = {"strategy": ("name", next(ref for key, ref in by_name.items() if DEFAULT in key))}
    default_launcher = str(LaunchSettings.model_fields["launcher"].default)
    unnamed["launch"] = "launcher", launchers.get(default_launcher, {})
    complete["properties"] = {**complete["properties"]}
    for name, (field, then) in unnamed.items():
        is_unnamed = {"type": "object", "properties": {field: _NULL}}
        complete["properties"][name] = {"if": is_unnamed, "then": then}
    complete["allOf"] = _needs(needs)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        **root,
        "if": {
            "required": ["extends"],
            "properties": {"extends": {"anyOf": [_TEXT, _FILES | {"minItems": 1}]}},
        },
        "else": complete,
        "$defs": defs,
    }, unread


def _complete(definition: Schema, place: Place) -> None:
    """Add what pydantic does not write: meanings, defaults that a function makes, and nulls."""
    kind, section = place.owner.partition(" ")[0], place.section
    nulls = kind in ("", "strategy") or (kind != "tracker" and place.whole)
    definition.pop("title", None)
    for name, field in section.model_fields.items():
        shown = definition["properties"][name]
        shown.pop("title", None)  # of the field's name, which hides its meaning
        if text := meaning_in(section, name):
            shown["description"] = text
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            shown.pop("default", None)
            if not isinstance(default, Section):
                shown["default"] = to_jsonable_python(default)
        if NULLS_REMOVED in field.metadata and isinstance(shown["additionalProperties"], dict):
            shown["additionalProperties"] = _or_null(shown["additionalProperties"])
        if nulls and not field.is_required():
            definition["properties"][name] = _or_null(shown)


def _or_null(schema: Schema) -> Schema:
    """A schema that takes null as well."""
    about: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    ways = rest.pop("anyOf") if rest.keys() == {"anyOf"} else [rest]
    return {**about, "anyOf": ways if _NULL in ways else [*ways, _NULL]}


def _required(schema: Schema, defs: Mapping[str, Schema]) -> Schema:
    """What values of a schema must have, in sections below it too, and nothing else of it."""
    if "$ref" in schema:
        return _required(defs[schema["$ref"].removeprefix(_REF)], defs)
    if "anyOf" in schema:  # one of the ways alone is a section
        return next(filter(None, (_required(way, defs) for way in schema["anyOf"])), {})
    found: Schema = {"required": schema["required"]} if "required" in schema else {}
    below = {name: _required(one, defs) for name, one in schema.get("properties", {}).items()}
    if below := {name: one for name, one in below.items() if one}:
        found["properties"] = below
    if isinstance(each := schema.get("additionalProperties"), dict) and _required(each, defs):
        found["additionalProperties"] = _required(each, defs)
    return found


def _without_required(schema: Any, defs: Mapping[str, Schema]) -> Any:
    """A schema that requires fields in items of lists alone, which no other file completes."""
    if isinstance(schema, list):
        return [_without_required(each, defs) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key != "required"}
    for key in found.keys() & {"anyOf", "additionalProperties"}:
        found[key] = _without_required(found[key], defs)
    if "properties" in found:
        below = found["properties"].items()
        found["properties"] = {name: _without_required(each, defs) for name, each in below}
    if isinstance(found.get("items"), dict):
        found["items"] |= _required(found["items"], defs)
    return found


def _rules(
    field: str, cases: Mapping[Any, Schema], open_values: Sequence[str] = ()
) -> list[Schema]:
    """What a name in `field` decides; where it says none, one of the cases must hold.

    Args:
        cases: names -> what holds where one of them is chosen.
        open_values: names that decide nothing, as none.
    """
    rules = [{"if": _named(field, names), "then": then} for names, then in cases.items()]
    is_open = {"properties": {field: {"enum": [*open_values, None]}}}
    return [*rules, {"if": is_open, "then": {"anyOf": list(cases.values())}}]


def _named(field: str, names: Iterable[str]) -> Schema:
    return {"required": [field], "properties": {field: {"enum": list(names)}}}


def _property(name: str, schema: Schema) -> Schema:
    return {"properties": {name: _or_null(schema) if schema else {}}}


def _allow(schema: Schema, field: str, names: Iterable[str]) -> None:
    """Have a field of text take these names alone."""
    schema["properties"][field]["anyOf"][0]["enum"] = list(names)


def _strategies(
    sections: Iterable[type[Section]], names: Mapping[type[Section], str], defs: dict[str, Schema]
) -> dict[tuple[str, ...], Schema]:
    """The words for each strategy, its shorthands among them -> reference to its section."""
    shorthands = {one.spec.name: one.spec.shorthands for one in installed_plugins().strategies}
    found: dict[tuple[str, ...], Schema] = {}
    for section in sections:
        if issubclass(section, StrategySection):
            name = strategy_of(section)
            words = (name, *shorthands[name])
            shown = defs[names[section].removeprefix(_REF)]["properties"]["name"]
            shown["anyOf"] = [{"enum": list(words)}, _NULL]
            found[words] = {"$ref": names[section]}
    return found


def _needs(needs: Mapping[str, Mapping[str, Schema]]) -> list[Schema]:
    """Of complete files: the options without which a plugin that they name would refuse them."""

    def having(name: str, inner: Schema) -> Schema:
        return {"required": [name], "properties": {name: {"type": "object", **inner}}}

    rules = [
        {"if": _named("backend", [name]), "then": having("backend_options", inner)}
        for name, inner in needs["backend"].items()
    ]
    for name, inner in needs["launcher"].items():
        chosen = having("launch", _named("launcher", [name]))
        rules.append({"if": chosen, "then": {"properties": {"launch": having("options", inner)}}})
    for name, inner in needs["tracker"].items():
        contains = {"type": "array", "contains": {"const": name}}
        chosen = {"required": ["trackers"], "properties": {"trackers": contains}}
        rules.append({"if": chosen, "then": having("tracker_options", having(name, inner))})
    return rules
