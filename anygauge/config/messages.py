"""Pydantic's complaints about a run file, each as one line that says what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from anygauge.config.describe import ELSEWHERE, LARGEST_SHOWN, Kind, homes, kind_at, meaning
from anygauge.config.origin import Problem, dotted
from anygauge.config.renamed import new_name, new_value
from anygauge.config.strategies import StrategySection, all_sections, named
from anygauge.util.hiding import is_secret

if TYPE_CHECKING:
    from anygauge.config.document import YamlNode

_MOST = 500
"""Complaints that are put in words. Whoever has that many needs the first of them."""

_YAML_BOOLEANS = ("yes", "no", "on", "off", "true", "false")


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
    new = new_name(path)
    if new is not None:
        node = root.nearest(*path)
        text = f"is called {dotted((*path[:-1], new))} now; rename it"
        value = new_value(path, node.value)
        if value is not node.value:
            text += f" (and its value {node.value}, which is now {value})"
        return Problem(node.origin, dotted(path), text)
    parent = kind_at(path[:-1], root)
    assert parent is not None and parent.section is not None
    valid = [*parent.section.model_fields, *([] if path[:-1] else ["extends"])]
    hints = ["no such field"]
    close = get_close_matches(name.lower(), valid, n=1)
    here = dotted(path[:-1])
    others: list[str] = []
    if issubclass(parent.section, StrategySection):
        others = [n for n, section in all_sections().items() if name in section.model_fields]
        hints = [f"strategy {named(parent.section)!r} has no such field"]
    if others:
        hints.append(f"it is a field of {' and '.join(f'strategy {each!r}' for each in others)}")
    elif places := [home or "the top level" for home in homes(name) if home != here]:
        hints.append(f"'{name}' belongs under {' or '.join(places)}")
    elif not close and name in ELSEWHERE:
        hints.append(f"here that is '{ELSEWHERE[name]}'")
    if close:
        hints.append(f"did you mean '{close[0]}'?")
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
    text = "; ".join([said, *_hints(node, expected)])
    return Problem(node.origin, dotted(path), text)


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
            if member.largest is not None and value > member.largest >= LARGEST_SHOWN:
                yield f"the largest is {member.largest:,.0f}".replace(",", "_")
    if int in takes and isinstance(value, float) and value.is_integer():
        yield f"write {int(value)}"
    if isinstance(value, str):
        for member in expected.members:
            if member.longest is not None and len(value) > member.longest:
                yield f"at most {member.longest} characters"
        close = get_close_matches(value, expected.choices, n=1)
        if close and len(expected.choices) > 1:
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
