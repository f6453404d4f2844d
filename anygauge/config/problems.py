"""What is wrong with a run file, each complaint as one line that says what to change.

Pydantic's complaints are put in words here, and what the schema's types cannot say is checked:
variables and expressions.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from anygauge.config.describe import ELSEWHERE, LARGEST_SHOWN, Kind, homes, kind_at, meaning
from anygauge.config.strategies import StrategySection, all_sections, named
from anygauge.config.tree import Problem, YamlNode, dotted
from anygauge.util.hiding import is_secret

_MOST = 500
"""Complaints that are put in words. Whoever has that many needs the first of them."""

_YAML_BOOLEANS = ("yes", "no", "on", "off", "true", "false")

LONGEST_EXPRESSION = 10_000

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head", "n_positions", "n_inner", "d_model"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
"""Fields of a model's configuration other than its layers that count something."""

MAY_BE_ZERO = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
"""0 in models of a family with experts that have none themselves."""

Path = tuple[object, ...]


def explain(error: ValidationError, root: YamlNode) -> list[Problem]:
    """One problem for each wrong field.

    Args:
        error: what pydantic said about `plain(root)`.
        root: the merged tree, for places and for values as they were written.
    """
    problems = []
    values: list[tuple[object, ...]] = []
    others: list[tuple[object, ...]] = []
    for item in error.errors(include_url=False)[:_MOST]:
        path = _path(item["loc"], root)
        kind = item["type"]
        others.append(path)
        if kind == "missing" and isinstance(item["loc"][-1], str):
            problems.append(_missing(path, root))
        elif kind == "extra_forbidden":
            problems.append(_unknown(path, root))
        elif kind == "value_error":
            problems.append(_refused(path, str(item["ctx"]["error"]), root))
        else:
            values.append(path)
    # A union complains once for each of its members, about the value and about what is in it:
    # the innermost is the one to change.
    outer = {path[:length] for path in others for length in range(len(path))}
    problems += [_wrong(path, root) for path in dict.fromkeys(values) if path not in outer]
    return problems


def _path(loc: Sequence[object], root: YamlNode) -> tuple[object, ...]:
    """`loc` without pydantic's names of union members, which are not part of the file."""
    path: tuple[object, ...] = ()
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if root.get(*path, part) is not None or (last and _is_field(path, part, root)):
            path = (*path, part)
    return path


def _is_field(path: tuple[object, ...], part: object, root: YamlNode) -> bool:
    kind = kind_at(path, root)
    return kind is not None and kind.section is not None and part in kind.section.model_fields


def _missing(path: tuple[object, ...], root: YamlNode) -> Problem:
    parent = kind_at(path[:-1], root)
    assert parent is not None and parent.section is not None
    text = meaning(parent.section.model_fields[str(path[-1])])
    return Problem(root.nearest(*path).origin, dotted(path), f"missing: {text}")


def _unknown(path: tuple[object, ...], root: YamlNode) -> Problem:
    name = str(path[-1])
    parent = kind_at(path[:-1], root)
    assert parent is not None and parent.section is not None
    valid = [*parent.section.model_fields, *([] if path[:-1] else ["extends"])]
    hints = ["no such field"]
    here = dotted(path[:-1])
    names = {
        theirs: ours.rpartition(".")[2]
        for theirs, ours in ELSEWHERE.items()
        if ours.rpartition(".")[0] == here and ": " not in ours
    }
    names |= {field: field for field in valid}
    close = [names[near] for near in get_close_matches(name.lower(), names, n=1)]
    others: list[str] = []
    if issubclass(parent.section, StrategySection):
        others = [n for n, section in all_sections().items() if name in section.model_fields]
        hints = [f"strategy {named(parent.section)!r} has no such field"]
    if others:
        hints.append(f"it is a field of {' and '.join(f'strategy {each!r}' for each in others)}")
        if root.get("strategy", "name") is None:
            hints.append(f"add strategy.name: {' or '.join(others)}")
    elif places := [home or "the top level" for home in homes(name) if home != here]:
        hints.append(f"'{name}' belongs under {' or '.join(places)}")
    elif name in ELSEWHERE:
        hints.append(f"here that is '{ELSEWHERE[name]}'")
    elif close:
        hints.append(f"did you mean '{close[0]}'?")
    elif near := get_close_matches(name.lower(), ELSEWHERE, n=1, cutoff=0.85):
        hints.append(f"did you mean '{ELSEWHERE[near[0]]}'?")
    said = "; ".join(hints)
    said += " " if said.endswith("?") else "; "
    return Problem(
        root.nearest(*path).origin, dotted(path), f"{said}valid here: {', '.join(valid)}"
    )


def _refused(path: tuple[object, ...], text: str, root: YamlNode) -> Problem:
    """What a section's own check said, with the places of the fields that it names."""
    places = {
        name: str(node.origin)
        for name in re.findall(r"'(\w+)'", text)
        if (node := root.get(*path, name)) is not None and node.value is not None
    }
    if len(places) > 1:
        text += f" ({', '.join(f'{name}: {place}' for name, place in places.items())})"
    return Problem(root.nearest(*path).origin, dotted(path), text)


def _wrong(path: tuple[object, ...], root: YamlNode) -> Problem:
    node = root.nearest(*path)
    expected = kind_at(path, root) or Kind(Any)
    said = f"got {received(node, private=is_private(path))}, expected {wanted(expected)}"
    text = "; ".join([said, *_hints(node, expected), *_first_field(path, node, expected)])
    return Problem(node.origin, dotted(path), text)


def _value_here(value: str) -> str:
    """A value of another tool's as it is called here; any other as it is."""
    return ELSEWHERE.get(value, "").partition(": ")[2] or value


def _first_field(path: tuple[object, ...], node: YamlNode, expected: Kind) -> Iterator[str]:
    """Where a text stands in place of a section: the field of it that the text is for."""
    chosen = any(member.choices for member in expected.members)
    if expected.section is None or chosen or not isinstance(node.value, str):
        return
    for name in ("name", "type", "path", "param_dtype"):
        value, field = _value_here(node.value), expected.below(name)
        if field is not None and (value in field.choices or "text" in str(field)):
            yield f"write '{dotted((*path, name))}: {value}'"
            return


def _hints(node: YamlNode, expected: Kind) -> Iterator[str]:
    value = node.value
    takes = {member.annotation for member in expected.members}
    if str in takes and isinstance(value, int | float):
        if isinstance(value, bool) and node.text.lower() in _YAML_BOOLEANS:
            yield f"put it in quotes, YAML reads {node.text} as {str(value).lower()}"
        else:
            yield "put it in quotes to make it text"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for member in expected.members:
            largest = member.bound("le")
            if largest is not None and value > largest >= LARGEST_SHOWN:
                yield f"the largest is {largest:,.0f}".replace(",", "_")
    if int in takes and isinstance(value, float) and value.is_integer():
        yield f"write {int(value)}"
    if isinstance(value, str):
        for member in expected.members:
            longest = member.bound("max_length")
            if longest is not None and len(value) > longest:
                yield f"at most {longest} characters"
        choices = [choice for member in expected.members for choice in member.choices]
        close = get_close_matches(value, choices, n=1)
        if _value_here(value) in choices:
            close = [_value_here(value)]
        if close and len(choices) > 1:
            yield f"did you mean '{close[0]}'?"
        if takes & {int, float} and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value):
            yield "write it without quotes and without leading zeros"


def is_private(path: Sequence[object]) -> bool:
    """Whether the value at a path is not to be repeated in a message."""
    return path[:1] == ("environment",) or any(is_secret(str(part)) for part in path)


def received(node: YamlNode, *, private: bool = False) -> str:
    """A value as it was written, with its type: 'fast' (str), 1e3 (float), null.

    Args:
        private: the type alone.
    """
    value = node.value
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    if private:
        return f"a value of type {type(value).__name__} (not shown)"
    shown = repr(value) if isinstance(value, str) else node.text
    if len(shown) > 60:
        shown = f"{shown[:57]}..."
    return f"{shown} ({type(value).__name__})"


def wanted(kind: Kind) -> str:
    """What a field takes, as the end of "expected ..."."""
    words = [_with_article(member) for member in kind.members]
    return " or ".join(dict.fromkeys(words))


def _with_article(kind: Kind) -> str:
    if kind.section is not None:
        return f"a mapping of {', '.join(kind.section.model_fields)}"
    text = str(kind)
    plain = ("text", "null", "true", "one of", "any")
    if kind.choices or text.startswith(plain):
        return f"'{text}'" if len(kind.choices) == 1 else text
    return f"a {text}"


def value_problems(root: YamlNode) -> list[Problem]:
    """Complaints about values of the right type that no run could use.

    Args:
        root: the merged tree; whatever has a wrong type is left to the schema.
    """
    return [*_of_environment(root), *_of_targets(root)]


def _of_environment(root: YamlNode) -> Iterator[Problem]:
    node = root.get("environment")
    if node is None or not node.is_mapping:
        return
    for key, value in node.value.items():
        if not isinstance(key, str):
            continue
        # Values may be secrets: none is shown.
        path = dotted(("environment", key[:60]))
        if not key or "=" in key or "\0" in key:
            what = f"{key[:60]!r} cannot be the name of a variable"
            text = f"{what}: a name has at least one character, and no '=' or NUL"
            yield Problem(value.origin, path, text)
        elif "\0" in str(value.value):
            yield Problem(value.origin, path, "the value holds a NUL, which no variable can have")


def _of_targets(root: YamlNode) -> Iterator[Problem]:
    groups = root.get("adapter", "groups")
    count = len(groups.value) if groups is not None and isinstance(groups.value, tuple) else 0
    places: list[Path] = [("adapter", "groups", number, "targets") for number in range(count)]
    for path in [("adapter", "targets"), *places]:
        node = root.get(*path)
        if node is None or not isinstance(node.value, str) or node.value == "all-linear":
            continue
        complaint = expression_complaint(node.value)
        if complaint:
            text = (
                f"{node.value[:60]!r} {complaint}; valid: all-linear, a list of the last parts of "
                "layer names, or one regular expression over whole names"
            )
            yield Problem(node.origin, dotted(path), text)


def expression_complaint(text: str) -> str:
    """Why a text is not a regular expression; "" if it is one."""
    if len(text) > LONGEST_EXPRESSION:
        return f"has {len(text):,} characters; at most {LONGEST_EXPRESSION:,}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else in a later Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression ({error})"
    return ""
