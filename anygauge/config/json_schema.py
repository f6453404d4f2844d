"""The run file's JSON schema (draft 2020-12) for editors, with the options of installed plugins.

Pydantic writes the sections. What only the reader knows is added here: null stands for a default,
a plugin's name decides its options, and a file with `extends` need not have what others require.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from pydantic_core import to_jsonable_python

from anygauge.config.describe import SectionPlace, all_places, meaning_in, section_summary
from anygauge.config.plugin_sections import PluginSection
from anygauge.config.schema import RunFile
from anygauge.config.sections import OptimizerSection, TrainSection
from anygauge.config.strategies import StrategySection
from anygauge.interface import LaunchSettings
from anygauge.registry import AUTO, installed_plugins
from anygauge.registry.specs import OPTIONS_AT
from anygauge.util.section import NULLS_REMOVED, Section

Schema = dict[str, Any]

EXTENDS = "A file, or a list of files, that this one changes; relative to this file."
_REF = "#/$defs/"
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_FILES: Schema = {"type": "array", "items": _TEXT}


def run_file_schema() -> tuple[Schema, list[str]]:
    """Return the schema, and why options of a plugin cannot be read: they may then be anything."""
    places, unread = all_places()
    sections = {place.section: place for place in reversed(places)}
    models = [(section, "validation") for section in sections]
    found, made = models_json_schema(models, ref_template=f"{_REF}{{model}}")  # type: ignore[arg-type]
    refs: dict[Any, Schema] = {section: ref for (section, _), ref in found.items()}
    names = {section: ref["$ref"].removeprefix(_REF) for section, ref in refs.items()}
    whole: Mapping[str, Schema] = made["$defs"]
    for section, place in sections.items():
        _add_meanings(whole[names[section]], place)
    defs = {name: _drop_required(each, whole) for name, each in whole.items()}
    plugins = installed_plugins()
    options: dict[str, dict[str, Schema]] = {
        kind: {one.spec.name: {} for one in getattr(plugins, f"{kind}s")} for kind in OPTIONS_AT
    }
    for place in places:
        kind, _, name = place.owner.partition(" ")
        if kind in options and place.whole:
            options[kind][name] = refs[place.section]
    named: dict[str, dict[str, Schema]] = {"strategy": {}, "optimizer": {}}
    shorthands = {f"strategy {one.spec.name}": one.spec.shorthands for one in plugins.strategies}
    for section, place in sections.items():
        if issubclass(section, PluginSection):
            words = [section.plugin_name, *shorthands.get(place.owner, ())]
            named[section.plugin_kind] |= dict.fromkeys(words, refs[section])
            shown = defs[names[section]]["properties"]["name"]
            shown["anyOf"] = [{"enum": words}, _NULL]

    _add_plugin_rules(defs[names[LaunchSettings]], "launcher", "options", options["launcher"])
    root = defs.pop(names[RunFile])
    for kind, free in {"backend": [AUTO], "objective": []}.items():
        _add_plugin_rules(root, kind, f"{kind}_options", options[kind], free)
    fields = root["properties"]
    fields["extends"] = {"description": EXTENDS, "anyOf": [_TEXT, _FILES, _NULL]}
    _set_named(fields, "strategy", named["strategy"])
    fields["strategy"]["anyOf"].insert(0, {"enum": [*named["strategy"]]})
    _set_named(defs[names[TrainSection]]["properties"], "optimizer", named["optimizer"])
    fields["trackers"]["anyOf"][0] |= {
        "items": {"enum": [*options["tracker"]]},
        "uniqueItems": True,
    }
    fields["tracker_options"]["anyOf"][0] = {
        "type": "object",
        "properties": options["tracker"],
        "additionalProperties": False,
    }
    is_extended = {"anyOf": [_TEXT, _FILES | {"minItems": 1}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "if": {"required": ["extends"], "properties": {"extends": is_extended}},
        "else": _complete_file_rules(refs[RunFile], whole, options, named),
        "$defs": defs,
    }, unread


def _add_meanings(definition: Schema, place: SectionPlace) -> None:
    """Add what pydantic does not write: meanings, defaults that a function makes, and nulls."""
    kind, section = place.owner.partition(" ")[0], place.section
    nulls = kind in ("", "strategy", "optimizer") or (kind != "tracker" and place.whole)
    # Editors show titles above meanings.
    definition.pop("title", None)
    definition["description"] = section_summary(section)
    for name, field in section.model_fields.items():
        shown = definition["properties"][name]
        shown.pop("title", None)
        shown["description"] = meaning_in(section, name)
        values = shown.get("additionalProperties")
        if NULLS_REMOVED in field.metadata and isinstance(values, dict):
            shown["additionalProperties"] = _allow_null(values)
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            shown.pop("default", None)
            # The path of this interpreter says nothing on another machine.
            if not isinstance(default, Section) and default != sys.executable:
                shown["default"] = to_jsonable_python(default)
            definition["properties"][name] = _allow_null(shown) if nulls else shown


def _allow_null(schema: Schema) -> Schema:
    """Return a schema that takes null as well."""
    kept: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in kept}
    ways = rest.pop("anyOf") if rest.keys() == {"anyOf"} else [rest]
    return {**kept, "anyOf": ways if _NULL in ways else [*ways, _NULL]}


def _add_plugin_rules(
    section: Schema, field: str, options: str, cases: Mapping[str, Schema], free: Sequence[str] = ()
) -> None:
    """Have a plugin's name in one field decide what the field of its options takes."""
    section["properties"][field]["anyOf"][0]["enum"] = [*free, *cases]
    thens = {name: {"properties": {options: _allow_null(case)}} for name, case in cases.items()}
    section["allOf"] = [*section.get("allOf", ()), *_name_rules(field, thens, free)]


def _set_named(fields: Schema, field: str, cases: Mapping[str, Schema]) -> None:
    """Have a section's name decide what its other fields are."""
    named, rules = {"enum": [*cases, None]}, _name_rules("name", cases)
    section = {"type": "object", "properties": {"name": named}, "allOf": rules}
    fields[field] = {"description": fields[field]["description"], "anyOf": [section, _NULL]}


def _name_rules(field: str, cases: Mapping[str, Schema], free: Sequence[str] = ()) -> list[Schema]:
    """Say what holds for each name in a field; without one, or with a free one, any case does."""
    rules = [
        {"if": _having_field(field, {"const": name}), "then": then} for name, then in cases.items()
    ]
    is_free = {"properties": {field: {"enum": [*free, None]}}}
    return [*rules, {"if": is_free, "then": {"anyOf": [*cases.values()]}}]


def _having_field(field: str, schema: Schema) -> Schema:
    return {"required": [field], "properties": {field: schema}}


def _find_required(schema: Schema, whole: Mapping[str, Schema]) -> Schema:
    """Return what values of a schema must have, in sections below it too, and nothing else."""
    if "$ref" in schema:
        return _find_required(whole[schema["$ref"].removeprefix(_REF)], whole)
    if "anyOf" in schema:  # one of the ways alone is a section
        return next(filter(None, (_find_required(way, whole) for way in schema["anyOf"])), {})
    found: Schema = {"required": schema["required"]} if "required" in schema else {}
    below = {name: _find_required(one, whole) for name, one in schema.get("properties", {}).items()}
    if below := {name: one for name, one in below.items() if one}:
        found["properties"] = below
    if isinstance(each := schema.get("additionalProperties"), dict) and _find_required(each, whole):
        found["additionalProperties"] = _find_required(each, whole)
    return found


def _drop_required(schema: Any, whole: Mapping[str, Schema]) -> Any:
    """Require fields in items of lists alone, which no other file completes."""
    if isinstance(schema, list):
        return [_drop_required(each, whole) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key != "required"}
    for key in found.keys() & {"anyOf", "additionalProperties"}:
        found[key] = _drop_required(found[key], whole)
    if "properties" in found:
        below = found["properties"].items()
        found["properties"] = {name: _drop_required(each, whole) for name, each in below}
    if isinstance(found.get("items"), dict):
        found["items"] |= _find_required(found["items"], whole)
    return found


def _complete_file_rules(
    run: Schema,
    whole: Mapping[str, Schema],
    options: Mapping[str, Mapping[str, Schema]],
    named: Mapping[str, Mapping[str, Schema]],
) -> Schema:
    """Return what files without `extends` must have, and what a name that they lack stands for."""
    found = _find_required(run, whole)
    launcher = options["launcher"][LaunchSettings.model_fields["launcher"].default]
    strategy = named["strategy"][StrategySection.default_plugin]
    optimizer = named["optimizer"][OptimizerSection.default_plugin]
    unnamed: Schema = {"type": "object", "properties": {"name": _NULL}}
    train = found["properties"].setdefault("train", {}).setdefault("properties", {})
    train["optimizer"] = {"if": unnamed, "then": optimizer}
    for section, name, then in (
        ("strategy", "name", strategy),
        ("launch", "launcher", {"properties": {"options": _allow_null(launcher)}}),
    ):
        unnamed = {"type": "object", "properties": {name: _NULL}}
        found["properties"] = {**found["properties"], section: {"if": unnamed, "then": then}}
    found["allOf"] = []
    for kind, cases in options.items():
        for name, case in cases.items():
            needs, is_named = {"type": "object", **_find_required(case, whole)}, {"const": name}
            if "required" not in needs:
                continue
            if kind in ("backend", "objective"):
                chosen, then = (
                    _having_field(kind, is_named),
                    _having_field(f"{kind}_options", needs),
                )
            elif kind == "launcher":
                chosen = _having_field(
                    "launch", {"type": "object", **_having_field("launcher", is_named)}
                )
                then = {"properties": {"launch": _having_field("options", needs)}}
            else:
                chosen = _having_field("trackers", {"type": "array", "contains": is_named})
                then = _having_field("tracker_options", _having_field(name, needs))
            found["allOf"].append({"if": chosen, "then": then})
    return found
